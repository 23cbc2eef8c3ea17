/*
 * The attention that each key receives: the sum of the softmax weights of all rows; included once per level, after share.h.
 *
 * Attention has been computed before, and its log-sum-exp is known. So a weight is one exponential of a score that is
 * computed again (as in the backward pass of FlashAttention, arXiv 2205.14135, algorithm 4): no maximum is looked for, no
 * value is read, and attention itself is as it is without. A key's sum is made by one thread, in the order of the rows.
 */
struct NAME(observed) {
    const struct observation *o;
    int64_t rows, keys, parts; /* parts: of a head's keys */
};

/* Add the weights of one row to `sums`. `factor`: the scale times log2(e); `lse` in powers of two; `visible` scores count. */
NOINLINE static void NAME(add_weights)(const float *scores, int visible, float factor, float lse, float *sums) {
    int whole = visible / LANES * LANES;
    for (int i = 0; i < whole; i += LANES)
        *(vec_at *)(sums + i) += NAME(exp2)(*(vec_at *)(scores + i) * factor - lse);
    if (whole == visible)
        return;
    vec last = NAME(splat)(-INFINITY); /* what lies behind the last key may be NaN */
    for (int i = whole; i < visible; i++)
        last[i - whole] = scores[i];
    last = NAME(exp2)(last * factor - lse);
    for (int i = whole; i < visible; i++)
        sums[i] += last[i - whole];
}

/* Add the weights of `rows` rows, from row `first` on, on the keys `start` to `end - 1`; `stride` floats a row of scores. */
INLINE void NAME(add_rows)(const struct observation *o, int head, int64_t first, int rows, int64_t start, int64_t end,
                           const float *scores, int64_t stride, float *sums) {
    const struct attention *a = &o->attention;
    for (int r = 0; r < rows; r++) {
        int64_t seen = NAME(visible_keys)(a, first + r), visible = (seen < end ? seen : end) - start;
        if (visible > 0)
            NAME(add_weights)(scores + r * stride, (int)visible, a->scale * 1.44269504f,
                              a->lse[NAME(row_at)(a, head, first + r)] * 1.44269504f, sums);
    }
}

/* Add the weights of a group of rows, whose queries are loaded, on the keys `start` to `end - 1`. */
TARGET static void NAME(observe_group)(const struct observation *o, struct NAME(work) *w, struct NAME(group) g,
                                       int64_t start, int64_t end, float *sums) {
    const struct attention *a = &o->attention;
    for (int64_t at = start; at < end; at += SPAN) {
        const char *keys[SPAN / BLOCK];
        int64_t next = end - at < SPAN ? end : at + SPAN;
        int blocks = (int)((next - at + BLOCK - 1) / BLOCK);
        const char *group = NAME(group_of)(a, g.head, at / BLOCK);
        for (int j = 0; j < blocks; j++)
            keys[j] = NAME(readable_keys)(a, g.head, at / BLOCK + j, w->dequantized.keys + 2 * j * BLOCK * a->head_dim);
        if (group && !is_packed(a->kv_format))
            NAME(score_group)(a, w, group, g.rows);
        else
            NAME(score)(a, w->queries, keys, keys, blocks, g.rows, a->wide, w->scores, SPAN);
        NAME(add_rows)(o, g.head, g.first, g.rows, at, next, w->scores, SPAN, sums + (at - start));
    }
}

TARGET static int NAME(observe_parts)(const void *context, int64_t first, int64_t last) {
    const struct NAME(observed) *s = context;
    const struct attention *a = &s->o->attention;
    struct NAME(work) *w = NAME(own_work)(a);
    for (int64_t i = first; w && i < last; i++) {
        int64_t start = i % s->parts * OBSERVED_KEYS, end = s->keys - start < OBSERVED_KEYS ? s->keys : start + OBSERVED_KEYS;
        float sums[OBSERVED_KEYS] = {0}, *to = s->o->received + i / s->parts * s->o->stride + start;
        struct NAME(group) g = {.head = (int)(i / s->parts)};
        for (; g.first < s->rows; g.first += ROW_GROUP) {
            g.rows = s->rows - g.first < ROW_GROUP ? (int)(s->rows - g.first) : ROW_GROUP;
            NAME(load_queries)(a, g.head, g.first, g.rows, w->queries);
            NAME(observe_group)(s->o, w, g, start, end, sums);
        }
        for (int64_t key = 0; key < end - start; key++)
            to[key] += sums[key];
    }
    return !w;
}

TARGET static int NAME(observe)(const void *call) {
    const struct observation *o = call;
    struct NAME(observed) s = {.o = o, .rows = (int64_t)o->attention.tokens * o->attention.group};
    if (!s.rows)
        return 0;
    s.keys = NAME(visible_keys)(&o->attention, s.rows - 1);
    s.parts = (s.keys + OBSERVED_KEYS - 1) / OBSERVED_KEYS;
    return pool_run(NAME(observe_parts), &s, s.parts * o->attention.kv_heads);
}
