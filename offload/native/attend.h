/*
 * Attention over blocks of keys and values; included once per level, after tile.h.
 *
 * A head's keys are read in pieces of 512 tokens. Each piece gives a partial result (running maximum, sum and
 * unnormalised output, as in FlashAttention), and the partial results are folded in the order of the pieces. Where the
 * borders lie depends on nothing but the keys' places, so neither the number of threads nor the number of rows changes
 * any result, and two heads keep sixteen cores busy.
 */
struct NAME(work) { /* one thread's own memory */
    float scores[ROW_GROUP * SPAN];
    uint16_t shares[ROW_GROUP * SPAN]; /* softmax numerators in bf16, where those are multiplied */
    float queries[ROW_GROUP * MAX_HEAD_DIM];
    char last[4 * BLOCK * MAX_HEAD_DIM]; /* the values of a block that is not full */
    float partial[ROW_GROUP * (MAX_HEAD_DIM + 2)];
    float folded[ROW_GROUP * (MAX_HEAD_DIM + 2)];
};

/* A partial result of `rows` rows: maximum [rows], sum [rows], output [rows][head_dim]. */
struct NAME(partial) {
    float *maximum, *sum, *out;
};

INLINE struct NAME(partial) NAME(partial_at)(float *memory, int rows) {
    return (struct NAME(partial)){memory, memory + rows, memory + 2 * rows};
}

INLINE const char *NAME(block)(const struct attention *a, int head, int64_t index) {
    if (a->table)
        index = a->table[head * a->table_stride + index];
    int64_t bytes = (int64_t)2 * BLOCK * a->head_dim * (a->wide ? 4 : 2);
    return a->kv + head * a->head_stride + index * bytes;
}

/* Keys that a row sees. */
INLINE int64_t NAME(sight)(const struct attention *a, int64_t row) {
    return a->seen + (a->causal ? row / a->group : 0);
}

/* Rows `first` to `first + rows - 1` of a head, where tiles want them: pairs of bf16, or floats. */
TARGET static void NAME(load_queries)(const struct attention *a, int head, int64_t first, int rows, float *to) {
    int dim = a->head_dim, heads = a->kv_heads * a->group;
    for (int r = 0; r < rows; r++) {
        int64_t token = (first + r) / a->group, at = head * a->group + (first + r) % a->group;
        int64_t from = (token * heads + at) * dim;
        if (a->wide)
            memcpy(to + r * dim, (const float *)a->q + from, 4 * dim);
        else if (DOTS)
            memcpy((uint16_t *)to + r * dim, (const uint16_t *)a->q + from, 2 * dim);
        else
            for (int d = 0; d < dim; d++)
                to[r * dim + d] = widen(((const uint16_t *)a->q)[from + d]);
    }
}

/* Scores of `rows` rows against the blocks of a span, before scaling. */
INLINE void NAME(score)(const struct attention *a, struct NAME(work) *w, const char *const *keys,
                        const char *const *next, int blocks, int rows, int wide) {
    int dim = a->head_dim;
    struct NAME(tile) t = {.segments = 1, .pairs = dim / 2, .c_stride = SPAN, .fresh = 1};
    t.b_step = wide ? 8 * BLOCK : 4 * BLOCK;
    t.a_stride = DOTS && !wide ? 2 * dim : 4 * dim;
    for (int j = 0; j < blocks; j++) {
        t.b = keys + j, t.next = next + j;
        NAME(run_tiles)(rows, wide, &t, (const char *)w->queries, w->scores + j * BLOCK);
    }
}

/*
 * Scores of one row become numerators of its softmax, in powers of two: `factor` is the scale times log2(e), and
 * `maximum` is in the same units. What was summed before is rescaled if the maximum has grown.
 */
TARGET static void NAME(normalise)(float *scores, int64_t limit, int length, float factor, float *maximum, float *sum,
                                   float *out, int dim) {
    int columns = (length + BLOCK - 1) / BLOCK * BLOCK;
    int visible = limit < 0 ? 0 : limit < columns ? (int)limit : columns;
    for (int i = visible; i < columns; i++)
        scores[i] = -INFINITY;
    vec most = NAME(splat)(-INFINITY);
    for (int i = 0; i < columns; i += LANES)
        most = NAME(max)(*(vec_at *)(scores + i), most);
    float highest = most[0];
    for (int i = 1; i < LANES; i++)
        highest = most[i] > highest ? most[i] : highest;
    highest *= factor;
    if (highest > *maximum) {
        float shrink = exp2f(*maximum - highest);
        *sum *= shrink;
        for (int d = 0; d < dim; d += LANES)
            *(vec_at *)(out + d) *= shrink;
        *maximum = highest;
    }
    vec total = NAME(splat)(0);
    for (int i = 0; i < columns; i += LANES) {
        vec share = NAME(exp2)(*(vec_at *)(scores + i) * factor - *maximum);
        *(vec_at *)(scores + i) = share;
        if (i + LANES > visible) {
            for (int hidden = i < visible ? visible : i; hidden < i + LANES; hidden++)
                scores[hidden] = 0;
            share = *(vec_at *)(scores + i);
        }
        total += share;
    }
    float sums[LANES];
    *(vec_at *)sums = total;
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            sums[i] += sums[i + width];
    *sum += sums[0];
}

/* Add the values of a span, weighted by the numerators, to the output of each row. */
INLINE void NAME(gather)(const struct attention *a, struct NAME(work) *w, const char *const *values,
                         const char *const *next, int blocks, int rows, int wide, float *out) {
    int dim = a->head_dim;
    struct NAME(tile) t = {.segments = blocks, .pairs = BLOCK / 2, .c_stride = dim};
    const char *shifted[SPAN / BLOCK], *shifted_next[SPAN / BLOCK];
    t.b = shifted, t.next = shifted_next;
    t.b_step = wide ? 8 * dim : 4 * dim;
    t.a_stride = DOTS && !wide ? 2 * SPAN : 4 * SPAN;
    const char *shares = DOTS && !wide ? (const char *)w->shares : (const char *)w->scores;
    for (int d = 0; d < dim; d += BLOCK) {
        for (int j = 0; j < blocks; j++)
            shifted[j] = values[j] + 4 * d, shifted_next[j] = next[j] + 4 * d;
        NAME(run_tiles)(rows, wide, &t, shares, out + d);
    }
}

/* A copy of a block's values with zeros behind the first `tokens`: what lies there may be anything, even not numbers. */
TARGET static const char *NAME(cut)(const struct attention *a, struct NAME(work) *w, const char *values, int tokens) {
    int64_t dim = a->head_dim;
    memcpy(w->last, values, BLOCK * dim * (a->wide ? 4 : 2));
    for (int t = tokens; t < BLOCK; t++)
        for (int d = 0; d < dim; d++)
            if (a->wide)
                ((float *)w->last)[t * dim + d] = 0;
            else
                ((uint16_t *)w->last)[(t / 2 * dim + d) * 2 + t % 2] = 0;
    return w->last;
}

/* The partial result of `rows` rows over the keys `start` to `end - 1`, within one piece. */
TARGET static void NAME(piece)(const struct attention *a, struct NAME(work) *w, int head, int64_t first, int rows,
                               int64_t start, int64_t end, struct NAME(partial) p) {
    int dim = a->head_dim;
    int64_t half = (int64_t)BLOCK * dim * (a->wide ? 4 : 2);
    float factor = a->scale * 1.44269504f;
    for (int r = 0; r < rows; r++)
        p.maximum[r] = -INFINITY;
    memset(p.sum, 0, sizeof(float) * rows);
    memset(p.out, 0, sizeof(float) * rows * dim);
    for (int64_t at = start; at < end; at += SPAN) {
        int length = end - at < SPAN ? (int)(end - at) : SPAN, blocks = (length + BLOCK - 1) / BLOCK;
        const char *keys[SPAN / BLOCK], *values[SPAN / BLOCK], *next_keys[SPAN / BLOCK], *next_values[SPAN / BLOCK];
        for (int j = 0; j < blocks; j++) {
            int64_t next = at + SPAN + j * BLOCK < end ? at + SPAN : at;
            keys[j] = NAME(block)(a, head, at / BLOCK + j);
            values[j] = keys[j] + half;
            next_keys[j] = NAME(block)(a, head, next / BLOCK + j);
            next_values[j] = next_keys[j] + half;
            if ((j + 1) * BLOCK > length)
                values[j] = NAME(cut)(a, w, values[j], length - j * BLOCK);
        }
        NAME(score)(a, w, keys, next_keys, blocks, rows, a->wide);
        for (int r = 0; r < rows; r++)
            NAME(normalise)(w->scores + r * SPAN, NAME(sight)(a, first + r) - at, length, factor, p.maximum + r,
                            p.sum + r, p.out + r * dim, dim);
        if (DOTS && !a->wide)
            for (int i = 0; i < rows * SPAN; i++)
                w->shares[i] = narrow(w->scores[i]);
        NAME(gather)(a, w, values, next_values, blocks, rows, a->wide, p.out);
    }
}

/* Join a partial result to those before it. Rows that see none of its keys keep what they have. */
TARGET static void NAME(fold)(struct NAME(partial) into, struct NAME(partial) p, int rows, int dim) {
    for (int r = 0; r < rows; r++) {
        if (p.maximum[r] == -INFINITY)
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

TARGET static void NAME(finish)(const struct attention *a, int head, int64_t first, int rows, struct NAME(partial) p) {
    int dim = a->head_dim, heads = a->kv_heads * a->group;
    for (int r = 0; r < rows; r++) {
        int64_t at = (first + r) / a->group * heads + head * a->group + (first + r) % a->group;
        float over = 1 / p.sum[r];
        if (a->lse)
            a->lse[at] = p.maximum[r] * 0.693147181f + logf(p.sum[r]);
        for (int d = 0; d < dim; d++)
            if (a->narrow_out)
                ((uint16_t *)a->out)[at * dim + d] = narrow(p.out[r * dim + d] * over);
            else
                ((float *)a->out)[at * dim + d] = p.out[r * dim + d] * over;
    }
}

/* How the work is cut up: groups of rows of one head, and pieces of its keys. */
struct NAME(cuts) {
    int64_t rows, groups, pieces;
};

INLINE int NAME(group_rows)(const struct NAME(cuts) *c, int64_t group) {
    int64_t left = c->rows - group * ROW_GROUP;
    return left < ROW_GROUP ? (int)left : ROW_GROUP;
}

/* The partial result of one piece for one group of rows; all of its rows' maxima are -INFINITY if it lies beyond. */
INLINE void NAME(run_piece)(const struct attention *a, struct NAME(work) *w, int head, const struct NAME(cuts) *c,
                            int64_t group, int64_t piece, struct NAME(partial) p) {
    int rows = NAME(group_rows)(c, group);
    int64_t first = group * ROW_GROUP, end = NAME(sight)(a, first + rows - 1), start = piece * PIECE;
    end = end < start + PIECE ? end : start + PIECE;
    NAME(piece)(a, w, head, first, rows, start, end, p);
}

/* All pieces one after the other, by one thread: for many groups of rows. */
TARGET static void NAME(whole)(const struct attention *a, struct NAME(work) *w, int head, const struct NAME(cuts) *c,
                               int64_t group) {
    int rows = NAME(group_rows)(c, group);
    struct NAME(partial) all = NAME(partial_at)(w->folded, rows), p = NAME(partial_at)(w->partial, rows);
    NAME(load_queries)(a, head, group * ROW_GROUP, rows, w->queries);
    NAME(run_piece)(a, w, head, c, group, 0, all);
    for (int64_t piece = 1; piece < c->pieces && piece * PIECE < NAME(sight)(a, group * ROW_GROUP + rows - 1); piece++) {
        NAME(run_piece)(a, w, head, c, group, piece, p);
        NAME(fold)(all, p, rows, a->head_dim);
    }
    NAME(finish)(a, head, group * ROW_GROUP, rows, all);
}

TARGET static int NAME(attend_whole)(const struct attention *a, const struct NAME(cuts) *c) {
    int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) reduction(| : failed)
    for (int64_t task = a->kv_heads * c->groups - 1; task >= 0; task--) { /* the last rows see most: begin with them */
        struct NAME(work) *w = scratch(&own_memory, sizeof *w);
        if (w)
            NAME(whole)(a, w, (int)(task % a->kv_heads), c, task / a->kv_heads);
        else
            failed = 1;
    }
    return failed;
}

/* Pieces side by side; what they give is folded in order when all are done. */
TARGET static int NAME(attend_split)(const struct attention *a, const struct NAME(cuts) *c) {
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

TARGET static int NAME(attend)(const struct attention *a) {
    struct NAME(cuts) c = {.rows = (int64_t)a->tokens * a->group};
    c.groups = (c.rows + ROW_GROUP - 1) / ROW_GROUP;
    c.pieces = (NAME(sight)(a, c.rows - 1) + PIECE - 1) / PIECE;
    int enough = a->kv_heads * c.groups >= 4 * omp_get_max_threads();
    return enough || c.pieces == 1 ? NAME(attend_whole)(a, &c) : NAME(attend_split)(a, &c);
}
