/*
 * Products of many rows with quantised weights; included for AVX2, by quantized.h.
 *
 * What run_codes computes, in the same order, and so the same bits; but codes become floats once for all rows, some groups
 * at a time, which stay in the L1 cache.
 */
enum { NAME(DECODED) = 4 }; /* groups at a time */

struct NAME(decoded) {
    vec levels[NAME(DECODED)][GROUP_INPUTS][VECTORS];
    vec scales[NAME(DECODED)][2][VECTORS], minima[NAME(DECODED)][VECTORS];
    int groups, halves, has_minimum; /* halves: 2 with scales for 16 inputs each */
};

INLINE void NAME(decode_levels)(const int bits, const struct format *f, const char *codes,
                                vec levels[GROUP_INPUTS][VECTORS]) {
    ROLLED for (int quad = 0; quad < 4; quad++)
        UNROLL for (int i = 0; i < 8; i++)
            UNROLL for (int v = 0; v < VECTORS; v++)
                levels[8 * quad + i][v] = NAME(value)(bits, f, NAME(code)(bits, i / 2, i % 2, codes, quad, v));
}

/* Decode a group's levels, scales and minima; `outer` is the start of its block. */
NOINLINE static void NAME(decode_group)(const struct format *f, const char *codes, const char *outer,
                                        struct NAME(decoded) *d) {
    const int g = d->groups++, size = scale_bytes(f), header = header_bytes(f) / (1 + f->has_minimum);
#define CASE(width) case width: NAME(decode_levels)(width, f, codes, d->levels[g]); break;
    EACH_WIDTH(f->bits, CASE)
#undef CASE
    const int kind = f->wide ? NAME(WIDE) : f->nested ? NAME(NESTED) : NAME(PLAIN);
    const char *numbers = codes + code_bytes(f->bits);
    for (int v = 0; v < VECTORS; v++) {
        for (int half = 0; half < d->halves; half++)
            d->scales[g][half][v] = NAME(scale_of)(kind, numbers + half * size, outer, v);
        if (f->has_minimum)
            d->minima[g][v] = NAME(scale_of)(kind, numbers + d->halves * size, outer + header, v);
    }
}

/* Add the products of a tile of rows with decoded groups to `c`. `rows` is a constant. */
INLINE void NAME(add_decoded)(const int rows, const struct NAME(decoded) *d, const struct NAME(quantized_tile) *t,
                              const float *sums, const char *a, float *c) {
    const int64_t a_stride = t->a_stride, c_stride = t->c_stride, sums_stride = t->sums_stride;
    const int halves = d->halves, inputs = GROUP_INPUTS / halves, has_minimum = d->has_minimum;
    for (int g = 0; g < d->groups; g++)
        for (int half = 0; half < halves; half++) {
            const vec *column = d->levels[g][half * inputs];
            vec s[MAX_TILE][VECTORS];
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int v = 0; v < VECTORS; v++)
                    s[r][v] = NAME(splat)(0);
            ROLLED for (int i = 0; i < inputs; i++, a += 4, column += VECTORS)
                UNROLL for (int r = 0; r < rows; r++) {
                    const vec factor = NAME(splat)(*(const float *)(a + r * a_stride));
                    UNROLL for (int v = 0; v < VECTORS; v++)
                        s[r][v] += factor * column[v];
                }
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    vec total = NAME(at)(c + r * c_stride, v) + d->scales[g][half][v] * s[r][v];
                    if (has_minimum && half == halves - 1)
                        total += d->minima[g][v] * NAME(splat)(sums[r * sums_stride + g]);
                    ((vec_at *)(c + r * c_stride))[v] = total;
                }
        }
}

/* Whether this is faster for so many rows: codes that few rows read fast are decoded once for more of them. */
INLINE int NAME(are_many)(const struct format *f, int rows) { return rows >= (NAME(has_few)(f) ? 16 : 4); }

#define MANY(rows)                                                                                                 \
    NOINLINE static void NAME(decoded_##rows)(const struct NAME(decoded) *d, const struct NAME(quantized_tile) *t, \
                                              const float *sums, const char *a, float *c) {                        \
        NAME(add_decoded)(rows, d, t, sums, a, c);                                                                 \
    }
MANY(1) MANY(2) MANY(3) MANY(4) MANY(5) MANY(6)
#undef MANY

/* Add the products of any number of rows with decoded groups. */
INLINE void NAME(add_all_decoded)(int rows, const struct NAME(decoded) *d, const struct NAME(quantized_tile) *t,
                                  const float *sums, const char *a, float *c) {
    typedef void many(const struct NAME(decoded) *, const struct NAME(quantized_tile) *, const float *, const char *,
                      float *);
    static many *const all[] = {0, NAME(decoded_1), NAME(decoded_2), NAME(decoded_3),
                                NAME(decoded_4), NAME(decoded_5), NAME(decoded_6)};
    for (int some; rows; rows -= some) { /* tiles of about the same size: small ones wait for their sums */
        some = rows / ((rows + MAX_TILE - 1) / MAX_TILE);
        all[some](d, t, sums, a, c);
        a += some * t->a_stride, c += some * t->c_stride, sums += some * t->sums_stride;
    }
}

/* Multiply any number of rows with some blocks of a panel. */
NOINLINE static void NAME(many_rows)(int rows, const struct NAME(quantized_tile) *t, const char *a, float *c) {
    const struct format *f = t->format;
    const int groups = block_groups(f), group = (int)group_bytes(f);
    const char *b = t->panel;
    const float *sums = t->sums;
    struct NAME(decoded) d = {.halves = f->bits == 6 ? 2 : 1, .has_minimum = f->has_minimum};
    for (int r = 0; r < rows && t->fresh; r++)
        memset(c + r * t->c_stride, 0, 4 * BLOCK);
    for (int64_t block = 0; block < t->blocks; block++) {
        const char *outer = b;
        b += header_bytes(f);
        for (int g = 0; g < groups; g++, b += group) {
            NAME(decode_group)(f, b, outer, &d);
            if (d.groups < NAME(DECODED) && (g < groups - 1 || block < t->blocks - 1))
                continue;
            NAME(add_all_decoded)(rows, &d, t, sums, a, c);
            a += d.groups * 4 * GROUP_INPUTS, sums += d.groups, d.groups = 0;
        }
    }
}
