/*
 * Reading quantised keys and values; included once per level, after quantized.h. The layout is in types.h.
 *
 * Codes become bf16 numbers (exactly), in the layout of a block, and are multiplied as those of a block. Scales and
 * middles are applied to the other factor: q . (s * c + m) = (q * s) . c + q . m for keys, and likewise for numerators
 * and values. That is a product a row and token, not one a row, token and dimension. Where queries are bf16, processors
 * with AVX-512 do not convert codes: see quantized_bytes.h.
 */
struct NAME(dequantized) { /* scratch memory for one group, and for the rows that read it */
    char keys[4 * SPAN * MAX_HEAD_DIM] __attribute__((aligned(64)));
    char values[4 * SPAN * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float queries[ROW_GROUP * MAX_HEAD_DIM] __attribute__((aligned(64))); /* multiplied by a group's scales */
    float sums[ROW_GROUP]; /* of each row's products with a group's middles */
#if BYTES /* see quantized_bytes.h */
    int8_t digits[2 * ROW_GROUP * MAX_HEAD_DIM] __attribute__((aligned(64)));
    int32_t offsets[ROW_GROUP];
    float units[ROW_GROUP];
#endif
};

/* Store numbers as bf16, to nearest, ties to even. */
INLINE void NAME(store_narrow)(uint16_t *to, vec x) {
#if BYTES && !defined(TRIFORCE_EMULATE)
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh((__m512)x));
#elif DOTS && LANES == 4
    bfloat16x4_t shorts = vcvt_bf16_f32((float32x4_t)x);
    memcpy(to, &shorts, sizeof shorts);
#else
    for (int i = 0; i < LANES; i++)
        to[i] = narrow(x[i]);
#endif
}

/* Return the levels of member `k` of LANES lanes of a line; `k` is a constant. */
INLINE vec NAME(line_level)(const int k, const char *codes, int line, int vector) {
    ints word = ((const ints_at *)(codes + line * 64))[vector];
    return __builtin_convertvector(word << (24 - 8 * k) >> 24, vec);
}

/* Convert two members of a line to a row of bf16 pairs, or to two rows of floats, the second one at `second`. */
INLINE void NAME(unpack_members)(const int wide, const int x, const int y, const char *codes, int line, char *to,
                                 char *second) {
    UNROLL for (int v = 0; v < VECTORS; v++) {
        vec even = NAME(line_level)(x, codes, line, v), odd = NAME(line_level)(y, codes, line, v);
        if (wide) {
            ((vec_at *)to)[v] = even;
            ((vec_at *)second)[v] = odd;
        } else
            ((ints_at *)to)[v] = ((ints)even >> 16 & 0xffff) | ((ints)odd & (int32_t)0xffff0000);
    }
}

INLINE void NAME(unpack_keys_of)(const int wide, const struct attention *a, const char *group, char *to) {
    const char *codes = key_codes(group, a->head_dim);
    const int row = wide ? 128 : 64; /* bytes of a pair of dimensions */
    for (int line = 0; line < a->head_dim / 2; line++, to += 2 * row) {
        NAME(unpack_members)(wide, 0, 1, codes, line, to, to + 64);
        NAME(unpack_members)(wide, 2, 3, codes, line, to + row, to + row + 64);
    }
}

INLINE void NAME(unpack_values_of)(const int wide, const struct attention *a, const char *group, char *to) {
    const int64_t dim = a->head_dim, row = (wide ? 8 : 4) * dim; /* bytes of a pair of tokens */
    const char *codes = value_codes(group, dim);
    for (int line = 0; line < dim / 2; line++) {
        char *first = to + line / 8 * 64 + line % 8 * row, *second = first + 8 * row; /* the other block */
        NAME(unpack_members)(wide, 0, 2, codes, line, first, first + 4 * dim);
        NAME(unpack_members)(wide, 1, 3, codes, line, second, second + 4 * dim);
    }
}

/* Write the levels of a group's keys, or of its values, as the keys or values of two blocks, one after the other. */
NOINLINE static void NAME(unpack_keys)(const struct attention *a, const char *group, char *to) {
    if (a->wide)
        NAME(unpack_keys_of)(1, a, group, to);
    else
        NAME(unpack_keys_of)(0, a, group, to);
}

NOINLINE static void NAME(unpack_values)(const struct attention *a, const char *group, char *to) {
    if (a->wide)
        NAME(unpack_values_of)(1, a, group, to);
    else
        NAME(unpack_values_of)(0, a, group, to);
}

/* Return the quantised group, or the packed run, of a block of the order of reading; NULL for blocks as they are. */
INLINE const char *NAME(group_of)(const struct attention *a, int head, int64_t index) {
    if (!a->quantized)
        return NULL;
    int64_t entry = a->table[head * a->table_stride + index];
    int64_t group = ~entry / kv_group_blocks(a->kv_format), bytes = kv_group_bytes(a->kv_format, a->head_dim);
    return entry < 0 ? a->quantized + head * a->quantized_stride + group * bytes : NULL;
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
