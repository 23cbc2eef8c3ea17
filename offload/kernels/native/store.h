/* Storing new tokens in the cache's blocks. One version for all levels, because little is computed here. */

static inline float read_element(const void *row, int64_t i, int wide) {
    return wide ? ((const float *)row)[i] : widen(((const uint16_t *)row)[i]);
}

static inline void write_element(void *row, int64_t i, float x, int wide) {
    if (wide)
        ((float *)row)[i] = x;
    else
        ((uint16_t *)row)[i] = narrow(x);
}

UNFUSED
/* Apply RoPE to one head; dimension d is paired with d + dim / 2, as in Llama's checkpoints. */
static void rotate(const void *x, const void *cos, const void *sin, int dim, int wide, float *to) {
    for (int d = 0; d < dim / 2; d++) {
        float low = read_element(x, d, wide), high = read_element(x, d + dim / 2, wide);
        to[d] = low * read_element(cos, d, wide) - high * read_element(sin, d, wide);
        to[d + dim / 2] = high * read_element(cos, d + dim / 2, wide) + low * read_element(sin, d + dim / 2, wide);
    }
}

END_UNFUSED

/* Index of dimension `d` of token `t`, in elements from the start of the block's keys, or of its values. */
static inline int64_t key_index(int t, int d, int wide) {
    return wide ? d * BLOCK + t : (d / 2 * BLOCK + t) * 2 + d % 2;
}

static inline int64_t value_index(int t, int d, int dim, int wide) {
    return wide ? t * dim + d : (t / 2 * dim + d) * 2 + t % 2;
}

static void append_token(const struct append *a, int64_t token) {
    int dim = a->head_dim, wide = a->wide, item = wide ? 4 : 2;
    const char *cos = (const char *)a->cos + token * dim * item, *sin = (const char *)a->sin + token * dim * item;
    const char *q = (const char *)a->q + token * a->q_stride * item;
    const char *k = (const char *)a->k + token * a->k_stride * item;
    const char *v = (const char *)a->v + token * a->v_stride * item;
    float rotated[MAX_HEAD_DIM];
    for (int h = 0; h < a->heads; h++) {
        char *to = (char *)a->rotated + (token * a->heads + h) * dim * item;
        rotate(q + h * dim * item, cos, sin, dim, wide, rotated);
        for (int d = 0; d < dim; d++)
            write_element(to, d, rotated[d], wide);
    }
    int64_t at = a->start + token, bytes = (int64_t)2 * BLOCK * dim * item;
    int64_t block = a->table ? a->table[at / BLOCK] : at / BLOCK;
    int t = (int)(at % BLOCK);
    for (int h = 0; h < a->kv_heads && token >= a->stored; h++) {
        char *keys = a->kv + h * a->head_stride + block * bytes, *values = keys + bytes / 2;
        rotate(k + h * dim * item, cos, sin, dim, wide, rotated);
        for (int d = 0; d < dim; d++) {
            write_element(keys, key_index(t, d, wide), rotated[d], wide);
            write_element(values, value_index(t, d, dim, wide), read_element(v, h * dim + d, wide), wide);
        }
    }
}

static int append_tokens(const void *call, int64_t first, int64_t last) {
    for (int64_t token = first; token < last; token++)
        append_token(call, token);
    return 0;
}

static int append(const void *call) { return run_rows(append_tokens, call, ((const struct append *)call)->tokens); }
