/*
 * Attention to packed keys and values; included once per level, by attend.h.
 *
 * Decoded, they are the bf16 of a block in a block's order, so all sums have the bits that they have over plain blocks.
 * A few rows multiply a span's columns as soon as they are in registers. For more rows, or where a span has patches, it
 * becomes two blocks in a thread's scratch memory first.
 */
struct NAME(packed_span) { /* `run` is NULL where a block is not packed */
    const char *run;
    int number, odd; /* of the span in its run; whether the block is the second of it */
};

INLINE struct NAME(packed_span) NAME(packed_at)(const struct attention *a, int head, int64_t index) {
    const char *run = a->quantized && is_packed(a->kv_format) ? NAME(group_of)(a, head, index) : NULL;
    int block = run ? ~a->table[head * a->table_stride + index] % (RUN / BLOCK) : 0;
    return (struct NAME(packed_span)){run, block / 2, block % 2};
}

/* Whether two blocks that follow each other in the order of reading are those of one packed span. */
INLINE int NAME(is_whole_span)(struct NAME(packed_span) first, struct NAME(packed_span) second) {
    return first.run && first.run == second.run && first.number == second.number && first.odd < second.odd;
}

/* Set the values that are stored apart among the keys (0) or values (1) of a span's two blocks; NULL for one not wanted. */
INLINE void NAME(set_patches)(struct NAME(packed_span) s, int64_t dim, int which, char *const blocks[2]) {
    struct patches p = patches_of(s.run, dim, s.number, which);
    for (int i = 0; i < p.count; i++) {
        char *block = blocks[p.first[i].at / (BLOCK * dim)];
        if (block)
            ((uint16_t *)block)[p.first[i].at % (BLOCK * dim)] = p.first[i].value;
    }
}

/* Decode the keys (which: KEYS) or values of a span to those of two blocks, while the next ones are prefetched. */
NOINLINE static void NAME(unpack_span)(const struct attention *a, struct NAME(packed_span) s,
                                       struct NAME(packed_span) next, int which, char *to, char *second) {
    const int64_t dim = a->head_dim;
    const struct format *f = a->kv_format;
    if (which == KEYS) {
        struct strip keys = key_strip(s.run, dim, s.number, f), ahead = key_strip(next.run, dim, next.number, f);
        NAME(unpack_strip)(KEYS, &keys, &ahead, (int)dim / 2, to, second, 64);
    }
    for (int i = 0; i < dim / 32 && which == VALUES; i++) {
        struct strip values = value_strip(s.run, dim, s.number, i, f), ahead = value_strip(next.run, dim, next.number, i, f);
        NAME(unpack_strip)(VALUES, &values, &ahead, SPAN / 2, to + 128 * i, second + 128 * i, 4 * dim);
    }
    NAME(set_patches)(s, dim, which == VALUES, (char *const[]){to, second});
}

/* The lines of a strip of values that belong to the block of a span. */
INLINE struct strip NAME(block_strip)(const struct attention *a, struct NAME(packed_span) s, int number) {
    struct strip values = value_strip(s.run, a->head_dim, s.number, number, a->kv_format);
    values.high += s.odd * 64 * BLOCK / 2, values.low += s.odd * values.low_step * BLOCK / 4;
    return values;
}

/* Decode one block of a span as `unpack_span` does both. */
NOINLINE static void NAME(unpack_block)(const struct attention *a, struct NAME(packed_span) s,
                                        struct NAME(packed_span) next, int which, char *to) {
    const int64_t dim = a->head_dim;
    struct strip keys = key_strip(s.run, dim, s.number, a->kv_format);
    struct strip ahead = key_strip(next.run, dim, next.number, a->kv_format);
    if (which == KEYS)
        NAME(unpack_column)(&keys, &ahead, s.odd, (int)dim / 2, to);
    for (int i = 0; i < dim / 32 && which == VALUES; i++) {
        struct strip values = NAME(block_strip)(a, s, i), next_values = NAME(block_strip)(a, next, i);
        NAME(unpack_strip)(VALUES, &values, &next_values, BLOCK / 2, to + 128 * i, NULL, 4 * dim);
    }
    NAME(set_patches)(s, dim, which == VALUES, (char *const[]){s.odd ? NULL : to, s.odd ? to : NULL});
}

/*
 * Unpack block `index` of the order of reading, and also the one after it, if there are `more` and it is of the same span,
 * while those of `next` are prefetched. They are written to consecutive halves of blocks at `keys` and `values`. Returns
 * how many blocks these are.
 */
INLINE int NAME(unpack_blocks)(const struct attention *a, int head, int64_t index, int more, struct NAME(packed_span) next,
                               char *keys, char *values) {
    const int64_t half = (int64_t)2 * BLOCK * a->head_dim;
    struct NAME(packed_span) s = NAME(packed_at)(a, head, index);
    int both = more && NAME(is_whole_span)(s, NAME(packed_at)(a, head, index + 1));
    if (!next.run)
        next = s;
    for (int which = KEYS; which <= VALUES; which++) {
        char *to = which == KEYS ? keys : values;
        if (both)
            NAME(unpack_span)(a, s, next, which, to, to + half);
        else
            NAME(unpack_block)(a, s, next, which, to);
    }
    return 1 + both;
}

/* Return the keys of a block, which are unpacked to `to` if they are packed. */
INLINE const char *NAME(readable_keys)(const struct attention *a, int head, int64_t index, char *to) {
    struct NAME(packed_span) s = NAME(packed_at)(a, head, index);
    if (!s.run)
        return NAME(block)(a, head, index);
    NAME(unpack_block)(a, s, s, KEYS, to);
    return to;
}

/* Compute the scores of rows against a packed span whose columns stay in registers. */
INLINE void NAME(score_strip)(const struct attention *a, struct NAME(work) *w, struct NAME(packed_span) s,
                              struct NAME(packed_span) next, int rows) {
    const int dim = a->head_dim;
    struct strip keys = key_strip(s.run, dim, s.number, a->kv_format);
    struct strip ahead = key_strip(next.run, dim, next.number, a->kv_format);
    struct NAME(tile) t = {.pairs = dim / 2, .c_stride = SPAN, .fresh = 1, .strips = &keys, .next_strips = &ahead};
    t.a_stride = DOTS ? 2 * dim : 4 * dim;
    NAME(run_packed)(KEYS, rows, 2, t, (const char *)w->queries, w->scores);
}

/* Add the values of such a span, weighted by the numerators, to the output of each row. */
INLINE void NAME(gather_strips)(const struct attention *a, struct NAME(work) *w, struct NAME(packed_span) s,
                                struct NAME(packed_span) next, int rows, float *out) {
    const int dim = a->head_dim;
    struct strip values[MAX_HEAD_DIM / 32], ahead[MAX_HEAD_DIM / 32];
    for (int i = 0; i < dim / 32; i++) {
        values[i] = value_strip(s.run, dim, s.number, i, a->kv_format);
        ahead[i] = value_strip(next.run, dim, next.number, i, a->kv_format);
    }
    struct NAME(tile) t = {.pairs = SPAN / 2, .c_stride = dim, .strips = values, .next_strips = ahead};
    t.a_stride = DOTS ? 2 * SPAN : 4 * SPAN;
    NAME(run_packed)(VALUES, rows, dim / BLOCK, t, (const char *)(DOTS ? (void *)w->weights : w->scores), out);
}

/* Add a packed span, from position `at` on, to the partial result. */
NOINLINE static void NAME(add_packed_span)(const struct attention *a, struct NAME(work) *w, struct NAME(packed_span) s,
                                           struct NAME(packed_span) next, int rows, int64_t at, struct NAME(partial) p) {
    const int64_t half = (int64_t)2 * BLOCK * a->head_dim;
    const int few = rows <= NAME(PACKED_ROWS);
    char *scratch = w->dequantized.keys;
    const char *blocks[] = {scratch, scratch + half};
    for (int64_t i = 0; i < packed_header(a->head_dim) && next.run != s.run; i += 64)
        __builtin_prefetch(next.run + i, 0, 2);
    if (few && !patches_of(s.run, a->head_dim, s.number, 0).count) {
        NAME(score_strip)(a, w, s, next, rows);
    } else {
        NAME(unpack_span)(a, s, next, KEYS, scratch, scratch + half);
        NAME(score)(a, w->queries, blocks, blocks, SPAN / BLOCK, rows, 0, w->scores, SPAN);
    }
    NAME(normalise)(w->scores, DOTS ? w->weights : NULL, SPAN, 0, rows, at, SPAN, a->scale * 1.44269504f, SLACK,
                    a->head_dim, 1, p);
    if (few && !patches_of(s.run, a->head_dim, s.number, 1).count && a->head_dim / BLOCK % NAME(PACKED_COLUMNS) == 0) {
        NAME(gather_strips)(a, w, s, next, rows, p.out);
    } else {
        NAME(unpack_span)(a, s, next, VALUES, scratch, scratch + half);
        NAME(gather)(a, w, blocks, blocks, SPAN / BLOCK, rows, 0, p.out);
    }
}
