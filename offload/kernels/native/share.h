/*
 * Attention over whole heads, divided among threads; included once per level, after attend.h.
 *
 * A head's keys are read in pieces of 512 tokens, and the partial results are merged in the order of the pieces. The
 * borders of the pieces depend only on the positions of the keys, so neither the number of threads nor the number of
 * rows changes any result, and two heads keep sixteen cores busy.
 */
/* Merge a partial result into those before it. Rows that see none of its keys are unchanged; NaN is preserved. */
NOINLINE static void NAME(fold)(struct NAME(partial) into, struct NAME(partial) p, int rows, int dim) {
    for (int r = 0; r < rows; r++) {
        if (p.maximum[r] == -INFINITY && p.sum[r] == 0)
            continue;
        float most = into.maximum[r] > p.maximum[r] ? into.maximum[r] : p.maximum[r];
        float kept = exp2f(into.maximum[r] - most), added = exp2f(p.maximum[r] - most);
        into.maximum[r] = most;
        into.sum[r] = into.sum[r] * kept + p.sum[r] * added;
        for (int d = 0; d < dim; d += LANES) {
            vec_at *out = (vec_at *)(into.out + r * dim + d);
            *out = *out * kept + *(vec_at *)(p.out + r * dim + d) * added;
        }
    }
}

/* Store the attention of one row, output / sum: in fp32, or in bf16 where `narrow_out` is set. */
NOINLINE static void NAME(finish_row)(const float *out, float sum, int dim, void *to, int narrow_out) {
    float over = 1 / sum;
    for (int d = 0; d < dim; d++)
        if (narrow_out)
            ((uint16_t *)to)[d] = narrow(out[d] * over);
        else
            ((float *)to)[d] = out[d] * over;
}

/* The log of the summed exponentials of one row, in the same bits wherever its pieces were merged. */
NOINLINE static float NAME(log_sum)(float maximum, float sum) { return maximum * 0.693147181f + logf(sum); }

/* Index of row `r` of a KV head among all rows [tokens][kv_heads * group]. */
INLINE int64_t NAME(row_at)(const struct attention *a, int head, int64_t r) {
    return r / a->group * a->kv_heads * a->group + head * a->group + r % a->group;
}

NOINLINE static void NAME(finish)(const struct attention *a, int head, int64_t first, int rows,
                                  struct NAME(partial) p) {
    int dim = a->head_dim;
    for (int r = 0; r < rows; r++) {
        int64_t at = NAME(row_at)(a, head, first + r);
        if (a->lse)
            a->lse[at] = NAME(log_sum)(p.maximum[r], p.sum[r]);
        char *to = (char *)a->out + at * dim * (a->narrow_out ? 2 : 4);
        NAME(finish_row)(p.out + r * dim, p.sum[r], dim, to, a->narrow_out);
    }
}

/* The division of a call: groups of rows of one head, and pieces of its keys. */
struct NAME(split) {
    const struct attention *a;
    int64_t rows, groups, pieces;
    float *partials; /* [pieces][tokens][kv_heads * group][2 + head_dim] */
};

/* The number of keys that `rows` rows from row `first` on see together. */
INLINE int64_t NAME(most_visible)(const struct attention *a, int64_t first, int64_t rows) {
    int64_t most = NAME(visible_keys)(a, first + rows - 1);
    for (int64_t row = first; a->parents && row < first + rows; row += a->group - row % a->group) {
        int64_t seen = NAME(visible_keys)(a, row);
        most = seen > most ? seen : most;
    }
    return most;
}

/* One group of rows of one head; groups of all heads are numbered from 0, the heads of one group side by side. */
struct NAME(group) {
    int head, rows;
    int64_t first, end; /* its first row; the keys that its last row sees */
};

INLINE struct NAME(group) NAME(group_at)(const struct NAME(split) *s, int64_t number) {
    int64_t first = number / s->a->kv_heads * ROW_GROUP, left = s->rows - first;
    int rows = left < ROW_GROUP ? (int)left : ROW_GROUP;
    int64_t end = NAME(most_visible)(s->a, first, rows);
    return (struct NAME(group)){(int)(number % s->a->kv_heads), rows, first, end};
}

INLINE void NAME(load_group)(const struct NAME(split) *s, struct NAME(work) *w, struct NAME(group) g) {
    NAME(load_queries)(s->a, g.head, g.first, g.rows, w->queries);
}

/*
 * Compute the partial result of one piece for one group of rows; a row that sees no key of it has maximum -INFINITY.
 * This thread goes on with `more` pieces.
 */
INLINE void NAME(run_piece)(const struct NAME(split) *s, struct NAME(work) *w, struct NAME(group) g, int64_t piece,
                            int64_t more, struct NAME(partial) p) {
    int64_t start = piece * PIECE, end = g.end < start + PIECE ? g.end : start + PIECE;
    int64_t ahead = start + (1 + more) * PIECE;
    ahead = ahead < g.end ? ahead : g.end;
    NAME(piece)(s->a, w, g.head, g.first, g.rows, start, end, ahead, p);
}

/* Compute a group of rows over all pieces. */
TARGET static void NAME(run_group)(const struct NAME(split) *s, struct NAME(work) *w, struct NAME(group) g) {
    struct NAME(partial) all = NAME(partial_at)(w->folded, g.rows), p = NAME(partial_at)(w->partial, g.rows);
    NAME(load_group)(s, w, g);
    NAME(run_piece)(s, w, g, 0, s->pieces, all);
    for (int64_t piece = 1; piece < s->pieces && piece * PIECE < g.end; piece++) {
        NAME(run_piece)(s, w, g, piece, s->pieces, p);
        NAME(fold)(all, p, g.rows, s->a->head_dim);
    }
    NAME(finish)(s->a, g.head, g.first, g.rows, all);
}

TARGET static int NAME(whole_groups)(const void *context, int64_t first, int64_t last) {
    const struct NAME(split) *s = context;
    struct NAME(work) *w = NAME(own_work)(s->a);
    int64_t end = s->a->kv_heads * s->groups - 1; /* the last rows see the most keys and come first */
    for (int64_t i = first; w && i < last; i++)
        NAME(run_group)(s, w, NAME(group_at)(s, end - i));
    return !w;
}

/* Compute pieces, and store their partial results. */
TARGET static int NAME(partial_pieces)(const void *context, int64_t first, int64_t last) {
    const struct NAME(split) *s = context;
    const struct attention *a = s->a;
    struct NAME(work) *w = NAME(own_work)(s->a);
    for (int64_t i = first; w && i < last; i++) {
        int64_t piece = i % s->pieces;
        struct NAME(group) g = NAME(group_at)(s, i / s->pieces);
        struct NAME(partial) p = NAME(partial_at)(w->partial, g.rows);
        NAME(load_group)(s, w, g);
        NAME(run_piece)(s, w, g, piece, last - i - 1, p);
        for (int r = 0; r < g.rows; r++) {
            int64_t at = piece * a->kv_heads * s->rows + NAME(row_at)(a, g.head, g.first + r);
            float *to = s->partials + at * (2 + a->head_dim);
            to[0] = p.maximum[r];
            to[1] = p.sum[r];
            memcpy(to + 2, p.out + r * a->head_dim, sizeof(float) * a->head_dim);
        }
    }
    return !w;
}

TARGET static int NAME(merge_rows)(const void *call, int64_t first, int64_t last) {
    const struct merge *m = call;
    int dim = m->head_dim;
    for (int64_t r = first; r < last; r++) {
        float *row = m->into + r * (2 + dim);
        struct NAME(partial) into = {row, row + 1, row + 2};
        for (int64_t piece = 0; piece < m->pieces; piece++) {
            float *from = (float *)m->partials + (piece * m->rows + r) * (2 + dim);
            NAME(fold)(into, (struct NAME(partial)){from, from + 1, from + 2}, 1, dim);
        }
        if (m->lse)
            m->lse[r] = NAME(log_sum)(row[0], row[1]);
        if (m->out)
            NAME(finish_row)(row + 2, row[1], dim, (char *)m->out + r * dim * (m->narrow_out ? 2 : 4), m->narrow_out);
    }
    return 0;
}

TARGET static int NAME(merge)(const void *call) {
    const struct merge *m = call;
    return m->rows > 64 ? pool_run(NAME(merge_rows), m, m->rows) : NAME(merge_rows)(m, 0, m->rows);
}

/* Compute pieces in parallel, and merge their partial results, in order, when all are done. */
TARGET static int NAME(attend_pieces)(struct NAME(split) *s) {
    const struct attention *a = s->a;
    const int64_t rows = s->rows * a->kv_heads, size = rows * (2 + a->head_dim);
    s->partials = a->partials ? a->partials : scratch(&shared_memory, sizeof(float) * size * s->pieces);
    if (!s->partials || pool_run(NAME(partial_pieces), s, a->kv_heads * s->groups * s->pieces))
        return 1;
    if (a->partials)
        return 0;
    const struct merge m = {.into = s->partials, .partials = s->partials + size, .out = a->out, .lse = a->lse, .rows = rows,
                            .pieces = s->pieces - 1, .head_dim = a->head_dim, .narrow_out = a->narrow_out};
    return pool_run(NAME(merge_rows), &m, rows);
}

TARGET static int NAME(attend_parallel)(const struct attention *a) {
    struct NAME(split) s = {.a = a, .rows = (int64_t)a->tokens * a->group};
    if (!s.rows)
        return 0;
    s.groups = (s.rows + ROW_GROUP - 1) / ROW_GROUP;
    s.pieces = (NAME(most_visible)(a, 0, s.rows) + PIECE - 1) / PIECE;
    int64_t groups = a->kv_heads * s.groups, bytes = 4 * ROW_GROUP * (a->head_dim + 2) * groups * s.pieces;
    int enough = groups >= 4 * pool_threads(); /* to keep all threads busy without splitting heads */
    int costly = groups > a->kv_heads && bytes > MOST_PARTIALS;
    if (!a->partials && (enough || costly || s.pieces == 1))
        return pool_run(NAME(whole_groups), &s, groups);
    return NAME(attend_pieces)(&s);
}

/* Attend to a chain or a tree. Returns 2 if a parent does not come before its child. */
TARGET static int NAME(attend)(const void *call) {
    const struct attention *a = call;
    if (!a->parents || !a->tokens)
        return NAME(attend_parallel)(a);
    int32_t *depths = scratch(&tree_memory, sizeof *depths * a->nodes);
    if (!depths)
        return 1;
    for (int i = 0; i < a->nodes; i++) {
        if (a->parents[i] < -1 || a->parents[i] >= i)
            return 2;
        depths[i] = a->parents[i] < 0 ? 0 : depths[a->parents[i]] + 1;
    }
    struct attention tree = *a;
    int before = a->nodes - a->tokens;
    tree.depths = depths + before;
    if (depths[a->nodes - 1] == a->nodes - 1) { /* a chain */
        tree.parents = tree.depths = NULL;
        tree.seen += before;
    }
    return NAME(attend_parallel)(&tree);
}
