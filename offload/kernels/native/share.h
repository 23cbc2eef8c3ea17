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

/* Index of row `r` of a KV head among all rows [tokens][kv_heads * group]. */
INLINE int64_t NAME(row_at)(const struct attention *a, int head, int64_t r) {
    return r / a->group * a->kv_heads * a->group + head * a->group + r % a->group;
}

NOINLINE static void NAME(finish)(const struct attention *a, int head, int64_t first, int rows, struct NAME(partial) p) {
    int dim = a->head_dim;
    for (int r = 0; r < rows; r++) {
        int64_t at = NAME(row_at)(a, head, first + r);
        if (a->lse)
            a->lse[at] = p.maximum[r] * 0.693147181f + logf(p.sum[r]);
        NAME(finish_row)(p.out + r * dim, p.sum[r], dim, (char *)a->out + at * dim * (a->narrow_out ? 2 : 4), a->narrow_out);
    }
}

/* The division of the work: groups of rows of one head, and pieces of its keys. */
struct NAME(split) {
    int64_t rows, groups, pieces;
};

INLINE int NAME(group_rows)(const struct NAME(split) *c, int64_t group) {
    int64_t left = c->rows - group * ROW_GROUP;
    return left < ROW_GROUP ? (int)left : ROW_GROUP;
}

/* Compute the partial result of one piece for one group of rows; a row that sees no key of it has maximum -INFINITY. */
INLINE void NAME(run_piece)(const struct attention *a, struct NAME(work) *w, int head, const struct NAME(split) *c,
                            int64_t group, int64_t piece, struct NAME(partial) p) {
    int rows = NAME(group_rows)(c, group);
    int64_t first = group * ROW_GROUP, end = NAME(visible_keys)(a, first + rows - 1), start = piece * PIECE;
    end = end < start + PIECE ? end : start + PIECE;
    NAME(piece)(a, w, head, first, rows, start, end, p);
}

/* Compute one group of rows over all pieces by one thread, where there are many groups. */
TARGET static void NAME(run_group)(const struct attention *a, struct NAME(work) *w, int head, const struct NAME(split) *c,
                               int64_t group) {
    int rows = NAME(group_rows)(c, group);
    struct NAME(partial) all = NAME(partial_at)(w->folded, rows), p = NAME(partial_at)(w->partial, rows);
    NAME(load_queries)(a, head, group * ROW_GROUP, rows, w->queries);
    NAME(run_piece)(a, w, head, c, group, 0, all);
    for (int64_t piece = 1; piece < c->pieces && piece * PIECE < NAME(visible_keys)(a, group * ROW_GROUP + rows - 1); piece++) {
        NAME(run_piece)(a, w, head, c, group, piece, p);
        NAME(fold)(all, p, rows, a->head_dim);
    }
    NAME(finish)(a, head, group * ROW_GROUP, rows, all);
}

TARGET static int NAME(attend_whole)(const struct attention *a, const struct NAME(split) *c) {
    int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) reduction(| : failed)
    for (int64_t task = a->kv_heads * c->groups - 1; task >= 0; task--) { /* the last rows see the most keys and come first */
        struct NAME(work) *w = scratch(&own_memory, sizeof *w);
        if (w)
            NAME(run_group)(a, w, (int)(task % a->kv_heads), c, task / a->kv_heads);
        else
            failed = 1;
    }
    return failed;
}

/* Compute pieces in parallel, and merge their partial results in order when all are done. */
TARGET static int NAME(attend_split)(const struct attention *a, const struct NAME(split) *c) {
    int64_t size = ROW_GROUP * (a->head_dim + 2), tasks = a->kv_heads * c->groups;
    if (c->groups == 1)
        size = c->rows * (a->head_dim + 2);
    float *partials = scratch(&shared_memory, sizeof(float) * size * tasks * c->pieces);
    if (!partials)
        return 1;
    int failed = 0;
#pragma omp parallel reduction(| : failed)
    {
        struct NAME(work) *w = scratch(&own_memory, sizeof *w);
        failed = !w;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < tasks * c->pieces; i++) {
            int64_t task = i / c->pieces, group = task / a->kv_heads;
            int head = (int)(task % a->kv_heads), rows = NAME(group_rows)(c, group);
            if (!w)
                continue;
            NAME(load_queries)(a, head, group * ROW_GROUP, rows, w->queries);
            NAME(run_piece)(a, w, head, c, group, i % c->pieces, NAME(partial_at)(partials + i * size, rows));
        }
#pragma omp for schedule(static)
        for (int64_t task = 0; task < tasks; task++) {
            int rows = NAME(group_rows)(c, task / a->kv_heads);
            struct NAME(partial) all = NAME(partial_at)(partials + task * c->pieces * size, rows);
            for (int64_t piece = 1; piece < c->pieces; piece++)
                NAME(fold)(all, NAME(partial_at)(partials + (task * c->pieces + piece) * size, rows), rows, a->head_dim);
            NAME(finish)(a, (int)(task % a->kv_heads), task / a->kv_heads * ROW_GROUP, rows, all);
        }
    }
    return failed;
}

/* Compute one piece for one group of rows, and store the partial result for the caller to merge. */
TARGET static void NAME(store_partial)(const struct attention *a, struct NAME(work) *w, int head, const struct NAME(split) *c,
                                  int64_t group, int64_t piece) {
    int rows = NAME(group_rows)(c, group), dim = a->head_dim;
    struct NAME(partial) p = NAME(partial_at)(w->partial, rows);
    NAME(load_queries)(a, head, group * ROW_GROUP, rows, w->queries);
    NAME(run_piece)(a, w, head, c, group, piece, p);
    for (int r = 0; r < rows; r++) {
        int64_t at = piece * a->kv_heads * c->rows + NAME(row_at)(a, head, group * ROW_GROUP + r);
        float *to = a->partials + at * (2 + dim);
        to[0] = p.maximum[r];
        to[1] = p.sum[r];
        memcpy(to + 2, p.out + r * dim, sizeof(float) * dim);
    }
}

TARGET static int NAME(attend_partials)(const struct attention *a, const struct NAME(split) *c) {
    int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) reduction(| : failed)
    for (int64_t i = 0; i < a->kv_heads * c->groups * c->pieces; i++) {
        struct NAME(work) *w = scratch(&own_memory, sizeof *w);
        int64_t task = i / c->pieces;
        if (w)
            NAME(store_partial)(a, w, (int)(task % a->kv_heads), c, task / a->kv_heads, i % c->pieces);
        else
            failed = 1;
    }
    return failed;
}

TARGET static int NAME(merge)(const struct merge *m) {
    int dim = m->head_dim;
#pragma omp parallel for schedule(static) if (m->rows > 64)
    for (int64_t r = 0; r < m->rows; r++) {
        float *row = m->into + r * (2 + dim);
        struct NAME(partial) into = {row, row + 1, row + 2};
        for (int64_t piece = 0; piece < m->pieces; piece++) {
            float *from = (float *)m->partials + (piece * m->rows + r) * (2 + dim);
            NAME(fold)(into, (struct NAME(partial)){from, from + 1, from + 2}, 1, dim);
        }
        if (m->out)
            NAME(finish_row)(row + 2, row[1], dim, (char *)m->out + r * dim * (m->narrow_out ? 2 : 4), m->narrow_out);
    }
    return 0;
}

TARGET static int NAME(attend)(const struct attention *a) {
    struct NAME(split) c = {.rows = (int64_t)a->tokens * a->group};
    c.groups = (c.rows + ROW_GROUP - 1) / ROW_GROUP;
    c.pieces = (NAME(visible_keys)(a, c.rows - 1) + PIECE - 1) / PIECE;
    if (!c.rows)
        return 0;
    if (a->partials)
        return NAME(attend_partials)(a, &c);
    int64_t tasks = a->kv_heads * c.groups, room = 4 * ROW_GROUP * (a->head_dim + 2) * tasks * c.pieces;
    int enough = tasks >= 4 * omp_get_max_threads(); /* to keep all threads busy without splitting heads */
    int costly = tasks > a->kv_heads && room > MOST_PARTIALS;
    return enough || costly || c.pieces == 1 ? NAME(attend_whole)(a, &c) : NAME(attend_split)(a, &c);
}
