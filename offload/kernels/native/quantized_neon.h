/*
 * Tiles of products with quantised weights where a panel's 16 outputs are four vectors; included by level.h in place of the
 * tiles of quantized.h. Sums of one or two vectors at a time, of up to 6 rows, stay in registers beside the decoded weights.
 */

/* Multiply some quads of a group by a tile of rows, for `each` vectors of outputs. `rows`, `each` and `bits` are constants. */
INLINE void NAME(vector_dots)(const int rows, const int each, const int bits, const struct format *f, int first, int quads,
                              const char *codes, int vector, const char *a, int64_t a_stride, vec s[MAX_TILE][VECTORS]) {
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int e = 0; e < each; e++)
            s[r][e] = NAME(splat)(0);
    a += first * 32;
    ROLLED for (int quad = first; quad < first + quads; quad++, a += 32)
        UNROLL for (int half = 0; half < 2; half++) {
            vec columns[4][VECTORS]; /* of two pairs of inputs */
            UNROLL for (int i = 0; i < 4; i++)
                UNROLL for (int e = 0; e < each; e++)
                    columns[i][e] = NAME(value)(bits, f, NAME(code)(bits, 2 * half + i / 2, i % 2, codes, quad, vector + e));
            UNROLL for (int r = 0; r < rows; r++) {
                const vec factors = NAME(at)(a + r * a_stride, half);
                UNROLL for (int i = 0; i < 4; i++)
                    UNROLL for (int e = 0; e < each; e++)
                        s[r][e] += factors[i] * columns[i][e];
            }
        }
}

/* Return the scales or minima of a group, for one vector of outputs; `outer` has those of the block. */
INLINE vec NAME(numbers_of)(const struct format *f, const char *numbers, const char *outer, int vector) {
    if (f->wide)
        return NAME(at)(outer, vector);
    vec own = f->nested ? NAME(small)(numbers, vector) : NAME(halves)(numbers, vector);
    return f->nested ? own * NAME(halves)(outer, vector) : own;
}

/* Multiply a tile of rows with some blocks of a panel. `rows` and `bits` are constants. */
INLINE void NAME(run_vectors)(const int rows, const int bits, const struct NAME(quantized_tile) *t, const char *a, float *c) {
    const int each = rows == 1 && bits != FLOAT8 ? VECTORS : 2;
    const struct format *f = t->format;
    const int halves = bits == 6 ? 2 : 1, quads = 4 / halves; /* 6 bits: groups of 16 inputs */
    const int codes = code_bytes(bits), size = scale_bytes(f);
    const int64_t group = group_bytes(f);
    const char *b = t->panel;
    const float *sums = t->sums;
    vec total[MAX_TILE][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++)
            total[r][v] = t->fresh ? NAME(splat)(0) : NAME(at)(c + r * t->c_stride, v);
    for (int64_t block = 0; block < t->blocks; block++) {
        const char *outer = b, *outer_minima = b + header_bytes(f) / 2;
        b += header_bytes(f);
        for (int g = 0; g < block_groups(f); g++, sums++, a += 4 * GROUP_INPUTS, b += group) {
            ROLLED for (int line = 0; line < codes; line += 64)
                __builtin_prefetch(b + 6 * group + line);
            ROLLED for (int v = 0; v < VECTORS; v += each) {
                vec s[MAX_TILE][VECTORS];
                ROLLED for (int half = 0; half < halves; half++) {
                    NAME(vector_dots)(rows, each, bits, f, half * quads, quads, b, v, a, t->a_stride, s);
                    UNROLL for (int e = 0; e < each; e++) {
                        const vec scale = NAME(numbers_of)(f, b + codes + half * size, outer, v + e);
                        UNROLL for (int r = 0; r < rows; r++)
                            total[r][v + e] += scale * s[r][e];
                    }
                }
                for (int e = 0; e < each && f->has_minimum; e++) {
                    const vec least = NAME(numbers_of)(f, b + codes + halves * size, outer_minima, v + e);
                    for (int r = 0; r < rows; r++)
                        total[r][v + e] += least * sums[r * t->sums_stride];
                }
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++)
            ((vec_at *)(c + r * t->c_stride))[v] = total[r][v];
}

#define CASE(width)                                                                                                \
    case width:                                                                                                    \
        rows == 1   ? NAME(run_vectors)(1, width, t, a, c)                                                         \
        : rows == 2 ? NAME(run_vectors)(2, width, t, a, c)                                                         \
        : rows == 3 ? NAME(run_vectors)(3, width, t, a, c)                                                         \
        : rows == 4 ? NAME(run_vectors)(4, width, t, a, c)                                                         \
                    : NAME(run_vectors)(6, width, t, a, c);                                                        \
        break;
/* Run a tile of 6 rows or up to 4. */
TARGET static void NAME(vector_rows)(int rows, const struct NAME(quantized_tile) *t, const char *a, float *c) {
    EACH_WIDTH(t->format->bits, CASE)
}
#undef CASE

/* Run tiles over any number of rows; `a`, `c` and t.sums belong to the first row. */
INLINE void NAME(run_quantized_vectors)(int rows, struct NAME(quantized_tile) t, const char *a, float *c) {
    for (int some; rows > 0; rows -= some) {
        some = rows == 5 ? 3 : rows > 6 ? 6 : rows;
        NAME(vector_rows)(some, &t, a, c);
        a += some * t.a_stride, c += some * t.c_stride, t.sums += some * t.sums_stride;
    }
}
