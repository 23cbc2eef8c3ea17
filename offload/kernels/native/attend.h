/*
 * Attention of a group of rows over one piece of a head's keys and values; included once per level, after tile.h.
 *
 * The result is partial: maximum, sum and unnormalised output, as in FlashAttention (arXiv 2205.14135).
 */
struct NAME(tree) { /* what the rows of a tree do not share; see tree.h */
    int64_t base;
    float *scores;
    int64_t stride; /* floats between its rows */
    int32_t *path, *copied;
    int copies;
    char *values;
};

struct NAME(work) { /* scratch memory of one thread */
    struct NAME(tree) tree;
#if HAS_TILES
    struct tile_work tiles;
#endif
    float scores[ROW_GROUP * SPAN];
    uint16_t weights[ROW_GROUP * SPAN]; /* softmax numerators in bf16, for bf16 dot products */
    float queries[ROW_GROUP * MAX_HEAD_DIM];
    char last[4 * BLOCK * MAX_HEAD_DIM]; /* the values of a block that is not full, padded */
    float partial[ROW_GROUP * (MAX_HEAD_DIM + 2)];
    float folded[ROW_GROUP * (MAX_HEAD_DIM + 2)];
    struct NAME(dequantized) dequantized;
#if HAS_TILES
    struct scales scales;
    struct byte_work bytes;
#endif
};

/* A partial result of `rows` rows: maximum [rows], sum [rows], output [rows][head_dim]. */
struct NAME(partial) {
    float *maximum, *sum, *out;
};

INLINE struct NAME(partial) NAME(rows_from)(struct NAME(partial) p, int row, int dim) {
    return (struct NAME(partial)){p.maximum + row, p.sum + row, p.out + row * dim};
}

INLINE struct NAME(partial) NAME(partial_at)(float *memory, int rows) {
    return (struct NAME(partial)){memory, memory + rows, memory + 2 * rows};
}

/* The memory of a block in the order of reading; of its group if it is quantised, to prefetch. */
INLINE const char *NAME(block)(const struct attention *a, int head, int64_t index) {
    const char *group = NAME(group_of)(a, head, index);
    if (group)
        return group;
    if (a->table)
        index = a->table[head * a->table_stride + index];
    int64_t bytes = (int64_t)2 * BLOCK * a->head_dim * (a->wide ? 4 : 2);
    return a->kv + head * a->head_stride + index * bytes;
}

/* The number of keys that a row sees. */
INLINE int64_t NAME(visible_keys)(const struct attention *a, int64_t row) {
    return a->seen + (a->depths ? a->depths[row / a->group] : a->causal ? row / a->group : 0);
}

/* The number of keys before its window, which a row does not see. */
INLINE int64_t NAME(hidden_keys)(const struct attention *a, int64_t row) {
    int64_t hidden = a->window ? NAME(visible_keys)(a, row) - a->window : 0;
    return hidden > 0 ? hidden : 0;
}

/* Copy the query at element `from` of `q` to `to`, as the tiles read it: pairs of bf16, or floats. */
INLINE void NAME(load_query)(const void *q, int64_t from, int dim, int wide, void *to) {
    if (wide)
        memcpy(to, (const float *)q + from, 4 * dim);
    else if (DOTS)
        memcpy(to, (const uint16_t *)q + from, 2 * dim);
    else
        for (int d = 0; d < dim; d++)
            ((float *)to)[d] = widen(((const uint16_t *)q)[from + d]);
}

/* Copy rows `first` to `first + rows - 1` of a head to `to`, as the tiles read them. */
TARGET static void NAME(load_queries)(const struct attention *a, int head, int64_t first, int rows, float *to) {
    int dim = a->head_dim, heads = a->kv_heads * a->group, bytes = dim * (DOTS && !a->wide ? 2 : 4);
    for (int r = 0; r < rows; r++) {
        int64_t token = (first + r) / a->group, at = head * a->group + (first + r) % a->group;
        NAME(load_query)(a->q, (token * heads + at) * dim, dim, a->wide, (char *)to + r * bytes);
    }
}

/* Compute the scores of `rows` rows against some blocks, before scaling; `stride` floats between rows of `scores`. */
INLINE void NAME(score)(const struct attention *a, const float *queries, const char *const *keys,
                        const char *const *next, int blocks, int rows, int wide, float *scores, int64_t stride) {
    int dim = a->head_dim;
    struct NAME(tile) t = {.segments = 1, .pairs = dim / 2, .c_stride = stride, .fresh = 1};
    t.b_step = wide ? 8 * BLOCK : 4 * BLOCK;
    t.a_stride = DOTS && !wide ? 2 * dim : 4 * dim;
    t.b = keys, t.next = next, t.column_segments = 1;
    NAME(run_tiles)(rows, blocks, wide, t, (const char *)queries, scores);
}

/*
 * Replace the scores of one row with numerators of its softmax, in powers of two: `factor` is the scale times log2(e),
 * and `maximum` is in the same units. The sum and the output are rescaled if the maximum grows. Columns before `hidden`
 * and from `limit` on weigh nothing.
 */
NOINLINE static void NAME(normalise)(float *scores, int64_t hidden, int64_t limit, int length, float factor, float *maximum, float *sum,
                                   float *out, int dim) {
    int columns = (length + BLOCK - 1) / BLOCK * BLOCK;
    int visible = limit < 0 ? 0 : limit < columns ? (int)limit : columns;
    int before = hidden < 0 ? 0 : hidden < visible ? (int)hidden : visible;
    if (before == visible) /* the row sees no key of the span */
        before = visible = 0;
    for (int i = 0; i < before; i++)
        scores[i] = -INFINITY;
    for (int i = visible; i < columns; i++)
        scores[i] = -INFINITY;
    vec most = NAME(splat)(-INFINITY);
    for (int i = 0; i < columns; i += LANES)
        most = NAME(max)(*(vec_at *)(scores + i), most);
    float highest = NAME(largest_lane)(most) * factor;
    if (highest > *maximum) {
        float shrink = exp2f(*maximum - highest);
        *sum *= shrink;
        for (int d = 0; d < dim; d += LANES)
            *(vec_at *)(out + d) *= shrink;
        *maximum = highest;
    }
    vec total = NAME(splat)(0);
    for (int i = 0; i < columns; i += LANES) {
        vec weight = NAME(exp2)(*(vec_at *)(scores + i) * factor - *maximum);
        *(vec_at *)(scores + i) = weight;
        if (i + LANES > visible || i < before) {
            for (int unseen = i < visible ? visible : i; unseen < i + LANES; unseen++)
                scores[unseen] = 0;
            for (int unseen = i; unseen < before && unseen < i + LANES; unseen++)
                scores[unseen] = 0;
            weight = *(vec_at *)(scores + i);
        }
        total += weight;
    }
    *sum += NAME(sum_lanes)(total);
}

/* Add the values of a span, weighted by the numerators, to the output of each row. */
INLINE void NAME(gather)(const struct attention *a, struct NAME(work) *w, const char *const *values,
                         const char *const *next, int blocks, int rows, int wide, float *out) {
    int dim = a->head_dim;
    struct NAME(tile) t = {.segments = blocks, .pairs = BLOCK / 2, .c_stride = dim};
    t.b = values, t.next = next, t.column_bytes = 4 * BLOCK;
    t.b_step = wide ? 8 * dim : 4 * dim;
    t.a_stride = DOTS && !wide ? 2 * SPAN : 4 * SPAN;
    const char *weights = DOTS && !wide ? (const char *)w->weights : (const char *)w->scores;
    NAME(run_tiles)(rows, dim / BLOCK, wide, t, weights, out);
}

/* Return a copy of a block's values with zeros after the first `tokens`; uninitialised memory there may be NaN. */
TARGET static const char *NAME(pad_tail)(const struct attention *a, struct NAME(work) *w, const char *values,
                                         int tokens) {
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

/*
 * Weigh the values of a span, from position `at` on, by the scores of `rows` rows, and add them to the partial result.
 */
INLINE void NAME(add_span)(const struct attention *a, struct NAME(work) *w, int64_t first, int rows, int64_t at,
                           int length, const char *const *values, const char *const *next, struct NAME(partial) p) {
    int dim = a->head_dim, blocks = (length + BLOCK - 1) / BLOCK;
    for (int r = 0; r < rows; r++)
        NAME(normalise)(w->scores + r * SPAN, NAME(hidden_keys)(a, first + r) - at,
                        NAME(visible_keys)(a, first + r) - at, length, a->scale * 1.44269504f,
                        p.maximum + r, p.sum + r, p.out + r * dim, dim);
    if (DOTS && !a->wide)
        for (int i = 0; i < rows * SPAN; i += LANES)
            NAME(store_narrow)(w->weights + i, *(vec_at *)(w->scores + i));
    NAME(gather)(a, w, values, next, blocks, rows, a->wide, p.out);
}

/* Multiply the numerators of a span by the scales of a group's values, and sum them with the middles into `sums`. */
NOINLINE static void NAME(scale_weights)(const struct attention *a, struct NAME(work) *w, const char *group, int rows) {
    const uint16_t *scales = (const uint16_t *)group + 2 * a->head_dim, *middles = scales + SPAN;
    for (int r = 0; r < rows; r++) {
        vec sum = NAME(splat)(0);
        for (int i = 0; i < SPAN; i += LANES) {
            vec weight = *(vec_at *)(w->scores + r * SPAN + i), scaled = weight * NAME(load)(scales, i, 0);
            sum += weight * NAME(load)(middles, i, 0);
            if (DOTS && !a->wide)
                NAME(store_narrow)(w->weights + r * SPAN + i, scaled);
            else
                *(vec_at *)(w->scores + r * SPAN + i) = scaled;
        }
        w->dequantized.sums[r] = NAME(sum_lanes)(sum);
    }
}

/* Add a number to each element of a row's output. */
INLINE void NAME(add_to_row)(float *out, float x, int dim) {
    for (int d = 0; d < dim; d += LANES)
        *(vec_at *)(out + d) += x;
}

/* Replace the scores of the rows' spans with numerators; see `normalise`. */
INLINE void NAME(normalise_span)(const struct attention *a, struct NAME(work) *w, int64_t first, int rows, int64_t at,
                                 struct NAME(partial) p) {
    for (int r = 0; r < rows; r++)
        NAME(normalise)(w->scores + r * SPAN, 0, NAME(visible_keys)(a, first + r) - at, SPAN, a->scale * 1.44269504f,
                        p.maximum + r, p.sum + r, p.out + r * a->head_dim, a->head_dim);
}

#if DOTS
/* Add a quantised span as below by products of bytes. */
NOINLINE static void NAME(span_of_bytes)(const struct attention *a, struct NAME(work) *w, const char *group, int64_t first,
                                         int rows, int64_t at, struct NAME(partial) p) {
    const int64_t stride = (a->head_dim + 31) / 32 * 32;
    NAME(query_digits)(a, &w->dequantized, group, (const uint16_t *)w->queries, rows, stride);
    NAME(score_bytes)(a, &w->dequantized, group, rows, stride, w->scores);
    NAME(normalise_span)(a, w, first, rows, at, p);
    float unit = NAME(weight_digits)(a, &w->dequantized, group, w->scores, rows);
    NAME(gather_bytes)(a, &w->dequantized, group, rows, unit, p.out);
}
#endif

/* Add a quantised span, from position `at` on, which all rows see, to the partial result. */
NOINLINE static void NAME(quantized_span)(const struct attention *a, struct NAME(work) *w, const char *group,
                                          int64_t first, int rows, int64_t at, struct NAME(partial) p) {
#if DOTS
    if (!a->wide && a->kv_format->bits != FLOAT8) {
        NAME(span_of_bytes)(a, w, group, first, rows, at, p);
        return;
    }
#endif
    int dim = a->head_dim;
    int64_t half = (int64_t)BLOCK * dim * (a->wide ? 4 : 2);
    struct NAME(dequantized) *q = &w->dequantized;
    const char *keys[] = {q->keys, q->keys + half}, *values[] = {q->values, q->values + half};
    NAME(unpack_keys)(a, group, q->keys);
    NAME(scale_queries)(a, q, group, w->queries, rows);
    NAME(score)(a, q->queries, keys, keys, SPAN / BLOCK, rows, a->wide, w->scores, SPAN);
    for (int r = 0; r < rows; r++)
        NAME(add_to_row)(w->scores + r * SPAN, q->sums[r], SPAN);
    NAME(normalise_span)(a, w, first, rows, at, p);
    NAME(unpack_values)(a, group, q->values);
    NAME(scale_weights)(a, w, group, rows);
    NAME(gather)(a, w, values, values, SPAN / BLOCK, rows, a->wide, p.out);
    for (int r = 0; r < rows; r++)
        NAME(add_to_row)(p.out + r * dim, q->sums[r], dim);
}

#include "tree.h"

/*
 * Compute the partial result of `rows` rows over the keys `start` to `end - 1`, within one piece.
 */
TARGET static void NAME(piece)(const struct attention *a, struct NAME(work) *w, int head, int64_t first, int rows,
                               int64_t start, int64_t end, struct NAME(partial) p) {
    int dim = a->head_dim;
    int64_t half = (int64_t)BLOCK * dim * (a->wide ? 4 : 2);
    for (int r = 0; r < rows; r++)
        p.maximum[r] = -INFINITY;
    memset(p.sum, 0, sizeof(float) * rows);
    memset(p.out, 0, sizeof(float) * rows * dim);
    int64_t shared = NAME(shared_end)(a, start, end);
    for (int64_t at = start; at < shared; at += SPAN) {
        int length = shared - at < SPAN ? (int)(shared - at) : SPAN, blocks = (length + BLOCK - 1) / BLOCK;
        const char *keys[SPAN / BLOCK], *values[SPAN / BLOCK], *next_keys[SPAN / BLOCK], *next_values[SPAN / BLOCK];
        const char *group = NAME(group_of)(a, head, at / BLOCK);
        if (group) {
            NAME(quantized_span)(a, w, group, first, rows, at, p);
            continue;
        }
        for (int j = 0; j < blocks; j++) {
            int64_t next = at + SPAN + j * BLOCK < shared ? at + SPAN : at;
            keys[j] = NAME(block)(a, head, at / BLOCK + j);
            values[j] = keys[j] + half;
            next_keys[j] = NAME(block)(a, head, next / BLOCK + j);
            next_values[j] = next_keys[j] + half;
            if ((j + 1) * BLOCK > length)
                values[j] = NAME(pad_tail)(a, w, values[j], length - j * BLOCK);
        }
        NAME(score)(a, w->queries, keys, next_keys, blocks, rows, a->wide, w->scores, SPAN);
        NAME(add_span)(a, w, first, rows, at, length, values, next_values, p);
    }
    if (shared < end)
        NAME(attend_paths)(a, w, head, first, rows, shared, end, p);
}
