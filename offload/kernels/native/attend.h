/*
 * Attention of a group of rows over one piece of a head's keys and values; included once per level, after tile.h.
 *
 * The result is partial: maximum, sum and unnormalised output, as in FlashAttention (arXiv 2205.14135). Sum and output
 * refer to the maximum, which scores may exceed by up to SLACK.
 */
struct NAME(tree) { /* what the rows of a tree do not share; see tree.h */
    int64_t base;
    float *scores;
    int64_t stride; /* floats between its rows */
    int32_t *path, *copied;
    int copies;
    char *values;
    char *room; /* for the blocks of the span at `base` that are packed */
    const char *unpacked[SPAN / BLOCK]; /* their keys, which values follow; NULL where a block is not packed */
};

struct NAME(work) { /* scratch memory of one thread */
    struct NAME(tree) tree;
    float scores[ROW_GROUP * LONG_SPAN];
    uint16_t weights[ROW_GROUP * LONG_SPAN]; /* softmax numerators in bf16, for bf16 dot products */
    float queries[ROW_GROUP * MAX_HEAD_DIM];
    char last[4 * BLOCK * MAX_HEAD_DIM]; /* the values of a block that is not full, padded */
    vec lanes[ROW_GROUP]; /* of the partial result */
    struct view views[ROW_GROUP];
    float partial[ROW_GROUP * (MAX_HEAD_DIM + 2)];
    float folded[ROW_GROUP * (MAX_HEAD_DIM + 2)];
    struct NAME(dequantized) dequantized;
};

/*
 * A partial result of `rows` rows: maximum [rows], sum [rows], output [rows][head_dim]. While it is computed, `lanes`
 * [rows] has the sums of every LANES-th numerator, and `views` [rows] what each row sees.
 */
struct NAME(partial) {
    float *maximum, *sum, *out;
    vec_at *lanes;
    const struct view *views;
};

INLINE struct NAME(partial) NAME(rows_from)(struct NAME(partial) p, int row, int dim) {
    return (struct NAME(partial)){p.maximum + row, p.sum + row, p.out + row * dim, p.lanes + row, p.views + row};
}

INLINE struct NAME(partial) NAME(partial_at)(float *memory, int rows) {
    return (struct NAME(partial)){memory, memory + rows, memory + 2 * rows, NULL, NULL};
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
    t.which = !wide && stride == LONG_SPAN ? KEYS : 0;
    NAME(run_tiles)(rows, blocks, wide, t, (const char *)queries, scores);
}

/* Raise a row's maximum, and rescale its sum and output. */
NOINLINE static void NAME(raise)(float highest, float *maximum, vec_at *sum, float *out, int dim) {
    float shrink = exp2f(*maximum - highest);
    *sum *= shrink;
    for (int d = 0; d < dim; d += LANES)
        *(vec_at *)(out + d) *= shrink;
    *maximum = highest;
}

/* Return LANES columns of a row, from column `i` on of a span at position `at`, with x for keys it does not see. */
INLINE vec NAME(seen)(vec row, struct view view, int64_t at, int i, float x) {
    ints lane = {0};
    for (int l = 0; l < LANES; l++)
        lane[l] = l;
    const int64_t before = view.start - at - i, visible = view.end - at - i;
    ints sees = (lane >= (int)(before < 0 ? 0 : before)) & (lane < (int)(visible < LANES ? visible : LANES));
    return (vec)(((ints)row & sees) | ((ints)NAME(splat)(x) & ~sees));
}

/* Replace the scores of a row with numerators of its softmax; see `normalise`. Returns 0 if it must not be rescaled. */
INLINE int NAME(normalise_row)(const int columns, float *scores, uint16_t *narrow, int64_t at, float factor,
                               float slack, int dim, int may_raise, struct NAME(partial) p) {
    const struct view view = *p.views;
    const int partly = view.start > at || view.end < at + columns;
    vec most = NAME(splat)(-INFINITY), total = NAME(splat)(0);
    UNROLL for (int i = 0; i < columns; i += LANES) {
        vec score = *(vec_at *)(scores + i);
        most = NAME(max)(partly ? NAME(seen)(score, view, at, i, -INFINITY) : score, most);
    }
    if (NAME(any_above)(most * factor, *p.maximum + slack)) {
        if (!may_raise)
            return 0;
        NAME(raise)(NAME(largest_lane)(most) * factor, p.maximum, p.lanes, p.out, dim);
    }
    const float maximum = *p.maximum;
    UNROLL for (int i = 0; i < columns; i += LANES) {
        vec weight = NAME(exp2)(*(vec_at *)(scores + i) * factor - maximum);
        if (partly)
            weight = NAME(seen)(weight, view, at, i, 0);
        total += weight;
        if (narrow)
            NAME(store_narrow)(narrow + i, weight);
        else
            *(vec_at *)(scores + i) = weight;
    }
    *p.lanes += total;
    return 1;
}

/*
 * Replace the scores of rows `first` to `rows - 1` for a span of `length` keys from position `at` on with numerators of their softmax,
 * in powers of two: `factor` is the scale times log2(e), and maxima are in the same units. Sums and outputs are rescaled
 * if a score exceeds its row's maximum by more than `slack`. If `narrow` is not NULL, numerators are stored there, in
 * bf16, and not in `scores`; rows of both are `stride` elements apart. Returns `rows`, or the first row that would have
 * to be rescaled, which is not done unless `may_raise` is set.
 */
NOINLINE static int NAME(normalise)(float *scores, uint16_t *narrow, int stride, int first, int rows, int64_t at,
                                    int length, float factor, float slack, int dim, int may_raise,
                                    struct NAME(partial) p) {
    for (int r = first; r < rows; r++) {
        struct NAME(partial) row = NAME(rows_from)(p, r, dim);
        float *own = scores + r * stride;
        uint16_t *to = narrow ? narrow + r * stride : NULL;
        if (length <= BLOCK)
            NAME(normalise_row)(BLOCK, own, to, at, factor, slack, dim, 1, row);
        else if (!NAME(normalise_row)(SPAN, own, to, at, factor, slack, dim, may_raise, row))
            return r;
    }
    return rows;
}

/* Add the values of blocks, weighted by the numerators from column `at` on, `stride` a row, to the output of each row. */
INLINE void NAME(gather_from)(const struct attention *a, struct NAME(work) *w, int at, int stride,
                              const char *const *values, const char *const *next, int blocks, int rows, int wide,
                              float *out) {
    int dim = a->head_dim;
    struct NAME(tile) t = {.segments = blocks, .pairs = BLOCK / 2, .c_stride = dim};
    t.b = values, t.next = next, t.column_bytes = 4 * BLOCK;
    t.b_step = wide ? 8 * dim : 4 * dim;
    t.a_stride = DOTS && !wide ? 2 * stride : 4 * stride;
    t.which = !wide && stride == LONG_SPAN ? VALUES : 0;
    const char *weights = DOTS && !wide ? (const char *)(w->weights + at) : (const char *)(w->scores + at);
    NAME(run_tiles)(rows, dim / BLOCK, wide, t, weights, out);
}

/* Add the values of a span, weighted by the numerators, to the output of each row. */
INLINE void NAME(gather)(const struct attention *a, struct NAME(work) *w, const char *const *values,
                         const char *const *next, int blocks, int rows, int wide, float *out) {
    NAME(gather_from)(a, w, 0, SPAN, values, next, blocks, rows, wide, out);
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
INLINE void NAME(add_span)(const struct attention *a, struct NAME(work) *w, int rows, int64_t at, int length,
                           const char *const *values, const char *const *next, struct NAME(partial) p) {
    NAME(normalise)(w->scores, DOTS && !a->wide ? w->weights : NULL, SPAN, 0, rows, at, length,
                    a->scale * 1.44269504f, SLACK, a->head_dim, 1, p);
    const int blocks = (length + BLOCK - 1) / BLOCK;
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

/* Replace the scores of a quantised span with numerators; see `normalise`. They are at most 1: digits have one unit. */
INLINE void NAME(normalise_group)(const struct attention *a, struct NAME(work) *w, int rows, int64_t at,
                                  struct NAME(partial) p) {
    NAME(normalise)(w->scores, NULL, SPAN, 0, rows, at, SPAN, a->scale * 1.44269504f, 0, a->head_dim, 1, p);
}

/* Return whether a quantised span is multiplied as bytes. */
INLINE int NAME(multiplies_bytes)(const struct attention *a) { return BYTES && !a->wide; }

/* Compute the scores of `rows` rows, whose queries are loaded, against a quantised span, before scaling. */
NOINLINE static void NAME(score_group)(const struct attention *a, struct NAME(work) *w, const char *group, int rows) {
    struct NAME(dequantized) *q = &w->dequantized;
#if BYTES
    if (NAME(multiplies_bytes)(a)) {
        const int64_t stride = (a->head_dim + 31) / 32 * 32;
        NAME(query_digits)(a, q, group, (const uint16_t *)w->queries, rows, stride);
        NAME(score_bytes)(a, q, group, rows, stride, w->scores);
        return;
    }
#endif
    const char *keys[] = {q->keys, q->keys + (int64_t)BLOCK * a->head_dim * (a->wide ? 4 : 2)};
    NAME(unpack_keys)(a, group, q->keys);
    NAME(scale_queries)(a, q, group, w->queries, rows);
    NAME(score)(a, q->queries, keys, keys, SPAN / BLOCK, rows, a->wide, w->scores, SPAN);
    for (int r = 0; r < rows; r++)
        NAME(add_to_row)(w->scores + r * SPAN, q->sums[r], SPAN);
}

/* Add a quantised span, from position `at` on, which all rows see, to the partial result. */
NOINLINE static void NAME(quantized_span)(const struct attention *a, struct NAME(work) *w, const char *group, int rows,
                                          int64_t at, struct NAME(partial) p) {
    struct NAME(dequantized) *q = &w->dequantized;
    NAME(score_group)(a, w, group, rows);
    NAME(normalise_group)(a, w, rows, at, p);
#if BYTES
    if (NAME(multiplies_bytes)(a)) {
        float unit = NAME(weight_digits)(a, q, group, w->scores, rows);
        NAME(gather_bytes)(a, q, group, rows, unit, p.out);
        return;
    }
#endif
    int dim = a->head_dim;
    const char *values[] = {q->values, q->values + (int64_t)BLOCK * dim * (a->wide ? 4 : 2)};
    NAME(unpack_values)(a, group, q->values);
    NAME(scale_weights)(a, w, group, rows);
    NAME(gather)(a, w, values, values, SPAN / BLOCK, rows, a->wide, p.out);
    for (int r = 0; r < rows; r++)
        NAME(add_to_row)(p.out + r * dim, q->sums[r], dim);
}

#include "packed_span.h"

#include "tree.h"

#if BYTES
#include "long_span.h"
#endif

/*
 * Compute the partial result of `rows` rows over the keys `start` to `end - 1`, within one piece. Those up to `ahead` are
 * read next.
 */
TARGET static void NAME(piece)(const struct attention *a, struct NAME(work) *w, int head, int64_t first, int rows,
                               int64_t start, int64_t end, int64_t ahead, struct NAME(partial) p) {
    int dim = a->head_dim;
    int64_t half = (int64_t)BLOCK * dim * (a->wide ? 4 : 2);
    p.lanes = (vec_at *)w->lanes, p.views = w->views;
    for (int r = 0; r < rows; r++) {
        p.maximum[r] = -INFINITY, p.lanes[r] = NAME(splat)(0);
        w->views[r] = (struct view){NAME(hidden_keys)(a, first + r), NAME(visible_keys)(a, first + r)};
    }
    memset(p.out, 0, sizeof(float) * rows * dim);
    int64_t shared = NAME(shared_end)(a, start, end);
    int64_t at = start;
#if BYTES
    at = NAME(add_long_spans)(a, w, head, rows, at, shared, ahead, p);
#endif
    for (; at < shared; at += SPAN) {
        int length = shared - at < SPAN ? (int)(shared - at) : SPAN, blocks = (length + BLOCK - 1) / BLOCK;
        const char *keys[SPAN / BLOCK], *values[SPAN / BLOCK], *next_keys[SPAN / BLOCK], *next_values[SPAN / BLOCK];
        const char *group = NAME(group_of)(a, head, at / BLOCK);
        if (group && !is_packed(a->kv_format)) {
            NAME(quantized_span)(a, w, group, rows, at, p);
            continue;
        }
        for (int j = 0; j < blocks; j++) {
            const int64_t next = at + SPAN + j * BLOCK < shared ? at + SPAN : at;
            struct NAME(packed) packed = NAME(packed_at)(a, head, at / BLOCK + j);
            keys[j] = NAME(block)(a, head, at / BLOCK + j);
            values[j] = keys[j] + half;
            next_keys[j] = NAME(block)(a, head, next / BLOCK + j);
            next_values[j] = next_keys[j] + half;
            if (packed.run) {
                char *to = w->dequantized.keys + 2 * j * half;
                NAME(unpack_keys_of_block)(a->kv_format, a->head_dim, packed, to);
                NAME(unpack_values_of_block)(a->kv_format, a->head_dim, packed, to + half);
                keys[j] = to, values[j] = to + half;
            }
            if ((j + 1) * BLOCK > length)
                values[j] = NAME(pad_tail)(a, w, values[j], length - j * BLOCK);
        }
        NAME(score)(a, w->queries, keys, next_keys, blocks, rows, a->wide, w->scores, SPAN);
        NAME(add_span)(a, w, rows, at, length, values, next_values, p);
    }
    if (shared < end)
        NAME(attend_paths)(a, w, head, first, rows, shared, end, p);
    for (int r = 0; r < rows; r++)
        p.sum[r] = NAME(sum_lanes)(p.lanes[r]);
}
