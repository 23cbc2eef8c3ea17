/*
 * The part of attention to a tree that its rows do not share; included once per level, by attend.h.
 *
 * The tokens of a tree are stored behind the prefix in the order of the call. A row sees the prefix and then its path,
 * from a token without parent down to its own. All rows read the spans before the first token together. From there on,
 * scores against all tokens are computed together, but each row picks those of its path, and the values of the path are
 * copied to stand in order: the same numbers are summed in the same order as in a chain, so the bits are a chain's.
 */
/* The first position of the span in which the first token is stored. */
INLINE int64_t NAME(tree_base)(const struct attention *a) { return (a->seen - 1) / SPAN * SPAN; }

/* Return the end of what all rows read together of the keys `start` to `end - 1`. */
INLINE int64_t NAME(shared_end)(const struct attention *a, int64_t start, int64_t end) {
    int64_t base = a->parents ? NAME(tree_base)(a) : end;
    return base < start ? start : base < end ? base : end;
}

/* Return this thread's scratch memory, or NULL. */
INLINE struct NAME(work) *NAME(own_work)(const struct attention *a) {
    int64_t base = NAME(tree_base)(a), before = a->parents ? a->seen - 1 - base : 0;
    int64_t keys = a->parents ? (before + a->nodes + BLOCK - 1) / BLOCK * BLOCK : 0;
    int64_t most = keys < PIECE ? keys : PIECE; /* that one piece copies */
    int packed = a->quantized && is_packed(a->kv_format);
    int64_t room = a->parents && packed ? (int64_t)4 * SPAN * a->head_dim : 0;
    struct NAME(work) *w;
    w = scratch(&own_memory, sizeof *w + room + 4 * (ROW_GROUP * keys + keys + most + most * a->head_dim));
    if (!w)
        return w;
    float *scores = (float *)((char *)(w + 1) + room);
    int32_t *path = (int32_t *)(scores + ROW_GROUP * keys);
    w->tree = (struct NAME(tree)){.base = base, .scores = scores, .stride = keys, .path = path, .copied = path + keys,
                                  .values = (char *)(path + keys + most), .room = (char *)(w + 1)};
    for (int64_t i = 0; i < before; i++)
        path[i] = i;
    return w;
}

/* Unpack the blocks of the prefix in the tree's first span that are packed: their tokens are read one by one. */
NOINLINE static void NAME(unpack_base)(const struct attention *a, struct NAME(tree) *t, int head) {
    const int64_t half = (int64_t)2 * BLOCK * a->head_dim;
    for (int j = 0; j < SPAN / BLOCK; j++) {
        char *to = t->room + 2 * j * half;
        struct NAME(packed) packed = {0};
        if (j * BLOCK < t->stride)
            packed = NAME(packed_at)(a, head, t->base / BLOCK + j);
        t->unpacked[j] = packed.run ? to : NULL;
        if (packed.run) {
            NAME(unpack_keys_of_block)(a->kv_format, a->head_dim, packed, to);
            NAME(unpack_values_of_block)(a->kv_format, a->head_dim, packed, to + half);
        }
    }
}

/* Return the keys of a block of the tree, counted from `base` on; its values follow them. */
INLINE const char *NAME(tree_block)(const struct attention *a, const struct NAME(tree) *t, int head, int64_t block) {
    const char *unpacked = block < SPAN / BLOCK ? t->unpacked[block] : NULL;
    return unpacked ? unpacked : NAME(block)(a, head, t->base / BLOCK + block);
}

/* Set `path`: for each position from `base` on, where that key of the token's row is stored, counted from `base`. */
INLINE void NAME(follow_path)(const struct attention *a, struct NAME(tree) *t, int64_t token) {
    int64_t before = a->seen - 1 - t->base, at = before + a->depths[token];
    for (int64_t node = a->nodes - a->tokens + token; node >= 0; node = a->parents[node])
        t->path[at--] = before + node;
}

/* Write the scores of the keys `start` to `end - 1` of the path to `to`; `row` is a row of this group. */
INLINE void NAME(pick_scores)(const struct NAME(tree) *t, int row, int64_t start, int64_t end, float *to) {
    const float *scores = t->scores + row * t->stride;
    for (int64_t at = start - t->base; at < end - t->base; at++)
        *to++ = scores[t->path[at]];
}

/* Copy the value of one token from a block's values to another's, or zeros. */
INLINE void NAME(copy_value)(int dim, int wide, const char *from, int from_token, char *to, int to_token) {
    if (wide && from)
        memcpy((float *)to + to_token * dim, (const float *)from + from_token * dim, 4 * dim);
    else if (wide)
        memset((float *)to + to_token * dim, 0, 4 * dim);
    else
        for (int d = 0; d < dim; d++)
            ((uint16_t *)to)[value_index(to_token, d, dim, 0)] =
                from ? ((const uint16_t *)from)[value_index(from_token, d, dim, 0)] : 0;
}

/*
 * Copy the values of the keys `start` to `end - 1` of the path into blocks, padded with zeros. Those which the path has
 * in common with the last one are there already; `copies` is 0 at first.
 */
TARGET static void NAME(copy_values)(const struct attention *a, struct NAME(tree) *t, int head, int64_t start,
                                     int64_t end) {
    const int32_t *path = t->path + (start - t->base);
    int64_t half = (int64_t)BLOCK * a->head_dim * (a->wide ? 4 : 2);
    int count = (int)(end - start), i = 0;
    while (i < count && i < t->copies && t->copied[i] == path[i])
        i++;
    for (; i < count || i % BLOCK; i++) {
        char *to = t->values + i / BLOCK * half;
        const char *from = i < count ? NAME(tree_block)(a, t, head, path[i] / BLOCK) + half : NULL;
        NAME(copy_value)(a->head_dim, a->wide, from, i < count ? path[i] % BLOCK : 0, to, i % BLOCK);
        if (i < count)
            t->copied[i] = path[i];
    }
    t->copies = count;
}

/* Return how many of `rows` rows of a head, from row `first` on, are of the same token as the first of them. */
INLINE int NAME(token_rows)(const struct attention *a, int64_t first, int rows) {
    int64_t same = a->group - first % a->group;
    return same < rows ? (int)same : rows;
}

/* Compute the scores of `rows` rows against everything stored from `base` on. */
TARGET static void NAME(score_tree)(const struct attention *a, struct NAME(work) *w, int head, int rows) {
    struct NAME(tree) *t = &w->tree;
    NAME(unpack_base)(a, t, head);
    for (int64_t at = 0; at < t->stride; at += BLOCK) {
        const char *keys = NAME(tree_block)(a, t, head, at / BLOCK);
        NAME(score)(a, w->queries, &keys, &keys, 1, rows, a->wide, t->scores + at, t->stride);
    }
}

/* Add the keys `start` to `end - 1` of each row's path to the partial result. */
TARGET static void NAME(attend_paths)(const struct attention *a, struct NAME(work) *w, int head, int64_t first,
                                      int rows, int64_t start, int64_t end, struct NAME(partial) p) {
    struct NAME(tree) *t = &w->tree;
    int64_t half = (int64_t)BLOCK * a->head_dim * (a->wide ? 4 : 2);
    NAME(score_tree)(a, w, head, rows);
    t->copies = 0;
    for (int row = 0, same; row < rows; row += same) {
        int64_t seen = NAME(visible_keys)(a, first + row), last = seen < end ? seen : end;
        same = NAME(token_rows)(a, first + row, rows - row);
        if (last <= start)
            continue;
        NAME(follow_path)(a, t, (first + row) / a->group);
        NAME(copy_values)(a, t, head, start, last);
        for (int64_t at = start; at < last; at += SPAN) {
            int length = last - at < SPAN ? (int)(last - at) : SPAN;
            const char *values[SPAN / BLOCK];
            for (int j = 0; j < SPAN / BLOCK; j++)
                values[j] = t->values + ((at - start) / BLOCK + j) * half;
            for (int r = 0; r < same; r++)
                NAME(pick_scores)(t, row + r, at, at + length, w->scores + r * SPAN);
            NAME(add_span)(a, w, same, at, length, values, values,
                           NAME(rows_from)(p, row, a->head_dim));
        }
    }
}
