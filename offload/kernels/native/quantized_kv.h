/*
 * Reading quantised keys and values; included once per level, after quantized.h. The layout is in types.h.
 *
 * Codes become bf16 numbers (exactly), in the layout of a block, and are multiplied as those of a block. Scales and
 * middles are applied to the other factor: q . (s * c + m) = (q * s) . c + q . m for keys, and likewise for numerators
 * and values. That is a product a row and token, not one a row, token and dimension.
 */
struct NAME(dequantized) { /* scratch memory for one group, and for the rows that read it */
    char keys[4 * SPAN * MAX_HEAD_DIM] __attribute__((aligned(64)));
    char values[4 * SPAN * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float queries[ROW_GROUP * MAX_HEAD_DIM] __attribute__((aligned(64))); /* multiplied by a group's scales */
    float sums[ROW_GROUP]; /* of each row's products with a group's middles */
};

/* Store numbers as bf16, to nearest, ties to even. */
INLINE void NAME(store_narrow)(uint16_t *to, vec x) {
#if DOTS && !defined(TRIFORCE_EMULATE)
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    for (int i = 0; i < LANES; i++)
        to[i] = narrow(x[i]);
#endif
}

/* Sum the lanes, in halves. */
INLINE float NAME(sum_lanes)(vec x) {
#ifdef __clang__
    float sums[LANES];
    *(vec_at *)sums = x;
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            sums[i] += sums[i + width];
    return sums[0];
#else
    ints lane = {0};
    for (int i = 0; i < LANES; i++)
        lane[i] = i;
    UNROLL for (int width = LANES / 2; width; width /= 2)
        x += __builtin_shuffle(x, lane ^ width);
    return x[0];
#endif
}

/* Convert quads of codes of 16 columns to bf16 pairs, `step` bytes apart, or to two rows of floats in as many bytes. */
INLINE void NAME(unpack_quads)(const int bits, const int wide, const struct NAME(tables) *tables, const char *codes,
                               int quads, char *to, int64_t step) {
    ROLLED for (int quad = 0; quad < quads; quad++) {
#if DOTS
        struct NAME(quad) q = NAME(load_quad)(bits, codes, quad);
#endif
        UNROLL for (int p = 0; p < 4; p++, to += step)
            UNROLL for (int v = 0; v < VECTORS; v++) {
#if DOTS
                ints pair = NAME(value_pair)(bits, p, tables, codes, quad, q);
                vec even = NAME(low_half)(pair), odd = NAME(high_half)(pair);
#else
                vec even = NAME(value)(bits, tables->format, NAME(code)(bits, p, 0, codes, quad, v));
                vec odd = NAME(value)(bits, tables->format, NAME(code)(bits, p, 1, codes, quad, v));
                ints pair = ((ints)even >> 16 & 0xffff) | ((ints)odd & (int32_t)0xffff0000);
#endif
                if (wide) {
                    ((vec_at *)to)[v] = even;
                    ((vec_at *)(to + step / 2))[v] = odd;
                } else
                    ((ints_at *)to)[v] = pair;
            }
    }
}

INLINE void NAME(unpack_keys_of)(const int bits, const int wide, const struct attention *a, const char *group, char *to) {
    int dim = a->head_dim;
    const char *codes = group + group_header(dim);
    struct NAME(tables) tables = NAME(load_tables)(a->kv_format);
    NAME(unpack_quads)(bits, wide, &tables, codes, dim / 4, to, wide ? 8 * BLOCK : 4 * BLOCK); /* both blocks */
}

INLINE void NAME(unpack_values_of)(const int bits, const int wide, const struct attention *a, const char *group,
                                   char *to) {
    int dim = a->head_dim;
    const char *codes = group + group_header(dim) + 2 * block_codes(a->kv_format, dim);
    struct NAME(tables) tables = NAME(load_tables)(a->kv_format);
    for (int block = 0; block < 2; block++, to += (wide ? 4 : 2) * BLOCK * dim)
        for (int d = 0; d < dim; d += BLOCK, codes += 2 * quad_bytes(a->kv_format))
            NAME(unpack_quads)(bits, wide, &tables, codes, 2, to + 4 * d, wide ? 8 * dim : 4 * dim);
}

#define UNPACK(which, width)                                                                                       \
    case width: a->wide ? NAME(unpack_##which##_of)(width, 1, a, group, to)                                        \
                        : NAME(unpack_##which##_of)(width, 0, a, group, to); break;
/* Write the levels of a group's keys, or of its values, as the keys or values of two blocks, one after the other. */
NOINLINE static void NAME(unpack_keys)(const struct attention *a, const char *group, char *to) {
    switch (a->kv_format->bits) {
        UNPACK(keys, 4) UNPACK(keys, 8) UNPACK(keys, FLOAT8)
    }
}

NOINLINE static void NAME(unpack_values)(const struct attention *a, const char *group, char *to) {
    switch (a->kv_format->bits) {
        UNPACK(values, 4) UNPACK(values, 8) UNPACK(values, FLOAT8)
    }
}
#undef UNPACK

/* Return the quantised group that begins at a block of the order of reading, or NULL for blocks as they are. */
INLINE const char *NAME(group_of)(const struct attention *a, int head, int64_t index) {
    if (!a->quantized)
        return NULL;
    int64_t entry = a->table[head * a->table_stride + index];
    return entry < 0 ? a->quantized + head * a->quantized_stride + ~entry / 2 * kv_group_bytes(a->kv_format, a->head_dim)
                     : NULL;
}

/* Multiply rows of queries, as the tiles read them, by the scales of a group's keys, and sum them with the middles. */
NOINLINE static void NAME(scale_queries)(const struct attention *a, struct NAME(dequantized) *w, const char *group,
                                         const float *queries, int rows) {
    const int dim = a->head_dim, pairs = DOTS && !a->wide; /* of bf16 */
    const uint16_t *scales = (const uint16_t *)group, *middles = scales + dim;
    for (int r = 0; r < rows; r++) {
        vec sum = NAME(splat)(0);
        for (int d = r * dim, i = 0; i < dim; d += LANES, i += LANES) {
            vec q = NAME(load)(queries, d, !pairs), scaled = q * NAME(load)(scales, i, 0);
            sum += q * NAME(load)(middles, i, 0);
            if (pairs)
                NAME(store_narrow)((uint16_t *)w->queries + d, scaled);
            else
                *(vec_at *)(w->queries + d) = scaled;
        }
        w->sums[r] = NAME(sum_lanes)(sum);
    }
}
