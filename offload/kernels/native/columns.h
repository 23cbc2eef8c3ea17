/*
 * Tiles over blocks of columns of bf16, one block after the other; included for AVX2, by tile.h.
 *
 * The sums are those of run_chains, in their order. Here the blocks are a loop within the code of each number of rows, and
 * where the rows lie SPAN floats apart, as the numerators of a span do, the compiler knows it: a tile is entered and left
 * in fewer cycles.
 */
/* Sum the even members (odd: 0), or add the odd ones to what those have left in `c`. */
INLINE void NAME(run_chain)(const int rows, const int odd, const int64_t a_stride, const struct NAME(tile) *t,
                            const char *a, float *c) {
    const int64_t step = t->b_step, c_stride = t->c_stride;
    vec sums[MAX_TILE][VECTORS];
    __asm__ volatile("" ::: "memory"); /* or GCC keeps the even sums in registers too, which are too few */
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++)
            sums[r][v] = odd || t->fresh ? NAME(splat)(0) : NAME(at)(c + r * c_stride, v);
    for (int s = 0; s < t->segments; s++) {
        const char *b = NAME(segment)(t, t->b, s, 0), *next = NAME(segment)(t, t->next, s, 0);
        for (int i = 0; i < t->pairs; i++, a += 8, b += step, next += step) {
            if (!odd)
                __builtin_prefetch(next, 0, 2);
            vec column[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++)
                column[v] = odd ? NAME(high_half)(((const ints_at *)b)[v]) : NAME(low_half)(((const ints_at *)b)[v]);
            UNROLL for (int r = 0; r < rows; r++) {
                const vec factor = NAME(splat)(*(const float *)(a + r * a_stride + odd * 4));
                UNROLL for (int v = 0; v < VECTORS; v++)
                    sums[r][v] += factor * column[v];
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++)
            ((vec_at *)(c + r * c_stride))[v] = odd ? NAME(at)(c + r * c_stride, v) + sums[r][v] : sums[r][v];
}

INLINE void NAME(run_columns)(const int rows, const int64_t a_stride, int blocks, struct NAME(tile) *t, const char *a,
                              float *c) {
    for (t->column = 0; t->column < blocks; t->column++, c += BLOCK)
        if (rows <= BOTH_CHAINS) {
            NAME(run_chains)(rows, 0, 0, 2, t, a, c);
        } else {
            NAME(run_chain)(rows, 0, a_stride, t, a, c);
            NAME(run_chain)(rows, 1, a_stride, t, a, c);
        }
}

#define CASE(rows) case rows: NAME(run_columns)(rows, a_stride, blocks, t, a, c); break;
#define COLUMNS(name, stride)                                                                                      \
    NOINLINE static void NAME(name)(int rows, int blocks, struct NAME(tile) *t, const char *a, float *c) {         \
        const int64_t a_stride = stride;                                                                           \
        switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }                                          \
    }
COLUMNS(columns, t->a_stride)
COLUMNS(span_columns, 4 * SPAN)
#undef COLUMNS
#undef CASE
