/* New tokens into the cache's blocks. Little is computed here: one version serves all processors. */

static inline float number(const void *row, int64_t i, int wide) {
    return wide ? ((const float *)row)[i] : widen(((const uint16_t *)row)[i]);
}

static inline void put(void *row, int64_t i, float x, int wide) {
    if (wide)
        ((float *)row)[i] = x;
    else
        ((uint16_t *)row)[i] = narrow(x);
}

/* Turn a head to its token's position; halves are paired, as in Llama's checkpoints. */
static void turn(const void *x, const void *cos, const void *sin, int dim, int wide, float *to) {
    for (int d = 0; d < dim / 2; d++) {
        float low = number(x, d, wide), high = number(x, d + dim / 2, wide);
        to[d] = low * number(cos, d, wide) - high * number(sin, d, wide);
        to[d + dim / 2] = high * number(cos, d + dim / 2, wide) + low * number(sin, d + dim / 2, wide);
    }
}

/* Where dimension `d` of a token lies in its block: as a number of elements from the block's keys, or its values. */
static inline int64_t key_place(int t, int d, int wide) {
    return wide ? d * BLOCK + t : (d / 2 * BLOCK + t) * 2 + d % 2;
}

static inline int64_t value_place(int t, int d, int dim, int wide) {
    return wide ? t * dim + d : (t / 2 * dim + d) * 2 + t % 2;
}

static void append_token(const struct append *a, int64_t token) {
    int dim = a->head_dim, wide = a->wide, item = wide ? 4 : 2;
    const char *cos = (const char *)a->cos + token * dim * item, *sin = (const char *)a->sin + token * dim * item;
    const char *q = (const char *)a->q + token * a->q_stride * item;
    const char *k = (const char *)a->k + token * a->k_stride * item;
    const char *v = (const char *)a->v + token * a->v_stride * item;
    float turned[MAX_HEAD_DIM];
    for (int h = 0; h < a->heads; h++) {
        char *to = (char *)a->turned + (token * a->heads + h) * dim * item;
        turn(q + h * dim * item, cos, sin, dim, wide, turned);
        for (int d = 0; d < dim; d++)
            put(to, d, turned[d], wide);
    }
    int64_t at = a->start + token, bytes = (int64_t)2 * BLOCK * dim * item;
    int t = (int)(at % BLOCK);
    for (int h = 0; h < a->kv_heads && token >= a->stored; h++) {
        char *keys = a->kv + h * a->head_stride + at / BLOCK * bytes, *values = keys + bytes / 2;
        turn(k + h * dim * item, cos, sin, dim, wide, turned);
        for (int d = 0; d < dim; d++) {
            put(keys, key_place(t, d, wide), turned[d], wide);
            put(values, value_place(t, d, dim, wide), number(v, h * dim + d, wide), wide);
        }
    }
}
