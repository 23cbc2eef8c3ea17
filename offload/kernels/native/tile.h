/*
 * The microkernel of all products here: a tile of up to MAX_TILE rows times 16 columns.
 *
 * Included once per level, with LEVEL, LANES, TARGET and DOTS (bf16 pairs are multiplied by one instruction) defined.
 * Each element of the result is summed in one fixed order, whatever the number of rows and columns: a row's result does
 * not depend on the other rows of the tile.
 */
typedef float NAME(vec) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(ints) __attribute__((vector_size(4 * LANES)));
typedef uint32_t NAME(uints) __attribute__((vector_size(4 * LANES))); /* for sums of bit patterns, which may wrap */
typedef NAME(vec) NAME(vec_at) __attribute__((aligned(4), may_alias)); /* unaligned, in memory */
typedef NAME(ints) NAME(ints_at) __attribute__((aligned(4), may_alias));
typedef int32_t NAME(pair_at) __attribute__((may_alias)); /* two bf16 in 32 bits */
#define vec NAME(vec)
#define ints NAME(ints)
#define uints NAME(uints)
#define vec_at NAME(vec_at)
#define ints_at NAME(ints_at)
#define VECTORS (BLOCK / LANES) /* of a block's 16 columns */
#define BYTES (DOTS && LANES == 16) /* there are products of bytes, and a block is a vector */

#define MAX_TILE (LANES == 16 ? 12 : 6)    /* rows whose sums fit the registers */
#define BOTH_CHAINS (LANES == 16 ? 12 : 3) /* the same with two sums for each element */
#define MAX_BLOCKS 4                       /* of columns, which DOTS multiplies at once with at most: */
#define FEW_ROWS 6                         /* rows; their sums and the columns fit the registers */

INLINE vec NAME(splat)(float x) { return x - (vec){0}; }

INLINE vec NAME(at)(const void *memory, int vector) { return ((const vec_at *)memory)[vector]; }

/* Elementwise maximum; y where either operand is NaN. */
INLINE vec NAME(max)(vec x, vec y) {
#if HAS_MAX && LANES == 16
    return (vec)_mm512_max_ps((__m512)x, (__m512)y);
#elif HAS_MAX && LANES == 8
    return (vec)_mm256_max_ps((__m256)x, (__m256)y);
#else
    ints more = x > y;
    return (vec)(((ints)x & more) | ((ints)y & ~more));
#endif
}

/* Return the vector with its lanes exchanged with those `width` further, in each 2 * `width` of them. */
INLINE vec NAME(exchange)(vec x, const int width) {
#ifdef __clang__
    vec y;
    for (int i = 0; i < LANES; i++)
        y[i] = x[i ^ width];
    return y;
#else
    ints lane = {0};
    for (int i = 0; i < LANES; i++)
        lane[i] = i ^ width;
    return __builtin_shuffle(x, lane);
#endif
}

/* Sum the lanes, in halves. */
INLINE float NAME(sum_lanes)(vec x) {
    UNROLL for (int width = LANES / 2; width; width /= 2)
        x += NAME(exchange)(x, width);
    return x[0];
}

INLINE float NAME(largest_lane)(vec x) {
    UNROLL for (int width = LANES / 2; width; width /= 2)
        x = NAME(max)(NAME(exchange)(x, width), x);
    return x[0];
}

/* Whether a lane is larger than y; NaN is not. */
INLINE int NAME(any_above)(vec x, float y) {
#if HAS_MAX && LANES == 16
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(y), _CMP_GT_OQ) != 0;
#elif HAS_MAX && LANES == 8
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, _mm256_set1_ps(y), _CMP_GT_OQ)) != 0;
#elif HAS_MAX
    return vmaxvq_u32((uint32x4_t)(x > y)) != 0;
#else
    return NAME(largest_lane)(x) > y;
#endif
}

INLINE vec NAME(low_half)(ints pair) { return (vec)(pair << 16); }
INLINE vec NAME(high_half)(ints pair) { return (vec)(pair & (int32_t)0xffff0000); }

typedef uint16_t NAME(halves_at) __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

/* Load LANES integers of 16 bits, with their signs. */
INLINE ints NAME(shorts)(const void *memory) {
#if HAS_MAX && LANES == 4 /* GCC converts short vectors number by number */
    int16x4_t shorts;
    memcpy(&shorts, memory, sizeof shorts);
    return (ints)vmovl_s16(shorts);
#else
    typedef int16_t shorts __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    return __builtin_convertvector(*(const shorts *)memory, ints);
#endif
}

/* Store the low 16 bits of each lane. */
INLINE void NAME(put_shorts)(void *memory, uints x) {
#if HAS_MAX && LANES == 4
    uint16x4_t shorts = vmovn_u32((uint32x4_t)x);
    memcpy(memory, &shorts, sizeof shorts);
#else
    *(NAME(halves_at) *)memory = __builtin_convertvector(x, __typeof__(NAME(halves_at)));
#endif
}

/* Load LANES elements from index `i` of a row of bf16 or fp32. */
INLINE vec NAME(load)(const void *row, int64_t i, int wide) {
    if (wide)
        return *(const vec_at *)((const float *)row + i);
    return (vec)(NAME(shorts)((const uint16_t *)row + i) << 16);
}

INLINE void NAME(store)(void *row, int64_t i, vec x, int wide) {
    if (wide) {
        *(vec_at *)((float *)row + i) = x;
        return;
    }
    uints bits = (uints)x; /* to nearest, ties to even; infinities survive */
    NAME(put_shorts)((uint16_t *)row + i, (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/* Store as bf16 as `narrow` does, NaN included. */
INLINE void NAME(store_rounded)(uint16_t *to, vec x) {
    uints bits = (uints)x, number = (uints)(x == x);
    NAME(put_shorts)(to, (((bits + 0x7fff + ((bits >> 16) & 1)) & number) | ((bits | 0x400000) & ~number)) >> 16);
}

#if DOTS && defined(TRIFORCE_EMULATE)
INLINE vec NAME(dot)(vec sum, ints pair, int32_t factor) {
    ints factors = factor - (ints){0};
    sum += NAME(high_half)(pair) * NAME(high_half)(factors);
    return sum + NAME(low_half)(pair) * NAME(low_half)(factors);
}
#elif DOTS && LANES == 4
INLINE vec NAME(dot)(vec sum, ints pair, int32_t factor) {
    const int32x2_t factors = {factor};
    return (vec)vbfdotq_lane_f32((float32x4_t)sum, (bfloat16x8_t)pair, (bfloat16x4_t)factors, 0);
}
#elif DOTS
INLINE vec NAME(dot)(vec sum, ints pair, int32_t factor) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pair, (__m512bh)_mm512_set1_epi32(factor));
}
#endif

/*
 * The operands of a tile. The rows `a` are pairs (32 bits for bf16 dot products, else two floats), one pair for each
 * pair of each segment of the columns `b`. The product is added to `c`, or replaces it if `fresh`.
 */
struct NAME(tile) {
    int64_t a_stride;     /* bytes between rows */
    const char *const *b; /* the start of each segment */
    const char *const *next; /* what is read after each segment, to prefetch into the L2 cache: more of it can be on the way */
    int64_t b_step;       /* bytes between pairs */
    int segments, pairs;  /* pairs of a segment */
    int column_segments, column_bytes; /* from a block of columns to the next one: in `b`, and in bytes */
    int column; /* the first block, set by run_tiles */
    int which;  /* 0, or KEYS or VALUES: of a long span in bf16, whose strides are constants for common heads */
    int64_t c_stride;     /* floats */
    int fresh;
};

/* Return where segment `s` of the tile's block `k` of columns starts, in `b` or in `next`. */
INLINE const char *NAME(segment)(const struct NAME(tile) *t, const char *const *b, int s, int k) {
    const int64_t column = t->column + k;
    return b[s + column * t->column_segments] + column * t->column_bytes;
}

/*
 * The even and the odd members of the pairs are summed in one chain each; the two sums are added at the end. For few
 * rows both chains run at once, to hide the latency of multiply-adds; many rows need the registers for one chain.
 */
INLINE void NAME(run_chains)(const int rows, const int wide, const int first, const int chains,
                             const struct NAME(tile) *t, const char *a, float *c) {
    const int64_t a_stride = t->a_stride, step = t->b_step, c_stride = t->c_stride;
    vec sums[2][MAX_TILE][VECTORS];
    UNROLL for (int chain = 0; chain < chains; chain++)
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < VECTORS; v++)
                sums[chain][r][v] = first + chain > 0 || t->fresh ? NAME(splat)(0) : NAME(at)(c + r * c_stride, v);
    for (int s = 0; s < t->segments; s++) {
        const char *b = NAME(segment)(t, t->b, s, 0), *next = NAME(segment)(t, t->next, s, 0);
        for (int i = 0; i < t->pairs; i++, a += 8, b += step, next += step) {
            if (first == 0)
                __builtin_prefetch(next, 0, 2);
            if (wide && first + chains == 2) /* a pair is two cache lines */
                __builtin_prefetch(next + step / 2, 0, 2);
            UNROLL for (int chain = 0; chain < chains; chain++) {
                const int odd = first + chain;
                vec column[VECTORS];
                UNROLL for (int v = 0; v < VECTORS; v++)
                    column[v] = wide  ? NAME(at)(b + odd * (step / 2), v)
                                : odd ? NAME(high_half)(((const ints_at *)b)[v])
                                      : NAME(low_half)(((const ints_at *)b)[v]);
                UNROLL for (int r = 0; r < rows; r++) {
                    vec factor = NAME(splat)(*(const float *)(a + r * a_stride + odd * 4));
                    UNROLL for (int v = 0; v < VECTORS; v++)
                        sums[chain][r][v] += factor * column[v];
                }
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++)
            ((vec_at *)(c + r * c_stride))[v] = chains == 2  ? sums[0][r][v] + sums[1][r][v]
                                                : first == 1 ? NAME(at)(c + r * c_stride, v) + sums[0][r][v]
                                                             : sums[0][r][v];
}

#if DOTS
/*
 * Multiply pairs of bf16, each by one dot-product instruction. An instruction takes several cycles, and depends on the
 * one before it: few rows are multiplied with several blocks of columns at once, so as not to wait. Where a block is
 * several vectors, these take the place of blocks.
 */
INLINE void NAME(run_dots)(const int rows, const int blocks, const struct NAME(tile) *t, const char *a, float *c) {
    const int64_t a_stride = t->a_stride, step = t->b_step, c_stride = t->c_stride;
    vec sums[MAX_BLOCKS][MAX_TILE];
    UNROLL for (int k = 0; k < blocks; k++)
        UNROLL for (int r = 0; r < rows; r++)
            sums[k][r] = t->fresh ? NAME(splat)(0) : NAME(at)(c + r * c_stride + k * LANES, 0);
    for (int s = 0; s < t->segments; s++) {
        const char *b[MAX_BLOCKS], *next[MAX_BLOCKS];
        UNROLL for (int k = 0; k < blocks; k++)
            b[k] = NAME(segment)(t, t->b, s, k / VECTORS) + k % VECTORS * 4 * LANES,
            next[k] = NAME(segment)(t, t->next, s, k / VECTORS);
        int64_t at = 0;
        for (int i = 0; i < t->pairs; i++, a += 4, at += step) {
            ints pair[MAX_BLOCKS];
            UNROLL for (int k = 0; k < blocks; k++) {
                if (k % VECTORS == 0)
                    __builtin_prefetch(next[k] + at, 0, 2);
                pair[k] = *(const ints_at *)(b[k] + at);
            }
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int k = 0; k < blocks; k++)
                    sums[k][r] = NAME(dot)(sums[k][r], pair[k], *(const NAME(pair_at) *)(a + r * a_stride));
        }
    }
    UNROLL for (int k = 0; k < blocks; k++)
        UNROLL for (int r = 0; r < rows; r++)
            *(vec_at *)(c + r * c_stride + k * LANES) = sums[k][r];
}
#endif

#if LANES == 8 && HAS_MAX
#include "columns.h"
#endif

INLINE void NAME(multiply)(const int rows, const int wide, const struct NAME(tile) *t, const char *a, float *c) {
#if DOTS
    if (!wide) {
        NAME(run_dots)(rows, VECTORS, t, a, c);
        return;
    }
#endif
    if (rows <= BOTH_CHAINS) {
        NAME(run_chains)(rows, wide, 0, 2, t, a, c);
    } else {
        NAME(run_chains)(rows, wide, 0, 1, t, a, c);
        NAME(run_chains)(rows, wide, 1, 1, t, a, c);
    }
}

#define CASE(rows) case rows: NAME(multiply)(rows, wide, t, a, c); break;
INLINE void NAME(multiply_rows)(int rows, const int wide, const struct NAME(tile) *t, const char *a, float *c) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if LANES == 16
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}
#undef CASE

TARGET static void NAME(narrow_tile)(int rows, const struct NAME(tile) *t, const char *a, float *c) {
    NAME(multiply_rows)(rows, 0, t, a, c);
}

TARGET static void NAME(wide_tile)(int rows, const struct NAME(tile) *t, const char *a, float *c) {
    NAME(multiply_rows)(rows, 1, t, a, c);
}

#if BYTES
#define CASE(rows, blocks) case rows: NAME(run_dots)(rows, blocks, t, a, c); break;
#define CASES(blocks)                                                                                              \
    switch (rows) {                                                                                                \
        CASE(1, blocks) CASE(2, blocks) CASE(3, blocks) CASE(4, blocks) CASE(5, blocks) CASE(6, blocks)            \
    }
TARGET static void NAME(two_blocks)(int rows, const struct NAME(tile) *t, const char *a, float *c) { CASES(2) }

/*
 * Multiply with four blocks of keys, or of the columns of values, of a long span. If `dim` is a constant, all addresses
 * fit the registers; else the compiler moves some of them through vector registers, at a tenth of the time. What follows
 * is prefetched in the order of memory: a quarter of the keys' pairs, or a segment of values, takes one entry of `next`.
 */
INLINE void NAME(run_long)(const int rows, const int which, const int dim, const struct NAME(tile) *t, const char *a,
                           float *c) {
    const int64_t a_stride = 2 * (which == KEYS ? dim : LONG_SPAN), c_stride = which == KEYS ? LONG_SPAN : dim;
    const int64_t step = 4 * (which == KEYS ? BLOCK : dim);
    const int parts = which == KEYS ? MAX_BLOCKS : t->segments, pairs = which == KEYS ? dim / 2 / MAX_BLOCKS : BLOCK / 2;
    vec sums[MAX_BLOCKS][FEW_ROWS];
    UNROLL for (int k = 0; k < MAX_BLOCKS; k++)
        UNROLL for (int r = 0; r < rows; r++)
            sums[k][r] = which == KEYS ? NAME(splat)(0) : NAME(at)(c + r * c_stride + k * BLOCK, 0);
    for (int part = 0; part < parts; part++) {
        const int64_t column = which == KEYS ? 0 : t->column * 4 * BLOCK;
        const char *b[MAX_BLOCKS], *next = t->next[part] + column;
        UNROLL for (int k = 0; k < MAX_BLOCKS; k++)
            b[k] = which == KEYS ? t->b[k] + part * pairs * step : t->b[part] + column + k * 4 * BLOCK;
        for (int64_t at = 0; at < pairs * step; at += step, a += 4) {
            ints pair[MAX_BLOCKS];
            UNROLL for (int k = 0; k < MAX_BLOCKS; k++) {
                __builtin_prefetch(next + k * 4 * BLOCK, 0, 2);
                pair[k] = *(const ints_at *)(b[k] + at);
            }
            next += which == KEYS ? MAX_BLOCKS * step : step;
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int k = 0; k < MAX_BLOCKS; k++)
                    sums[k][r] = NAME(dot)(sums[k][r], pair[k], *(const NAME(pair_at) *)(a + r * a_stride));
        }
    }
    UNROLL for (int k = 0; k < MAX_BLOCKS; k++)
        UNROLL for (int r = 0; r < rows; r++)
            *(vec_at *)(c + r * c_stride + k * BLOCK) = sums[k][r];
}

#define LONG_CASE(rows) case rows: NAME(run_long)(rows, which, dim, t, a, c); break;
INLINE void NAME(long_rows)(int rows, const int which, int dim, const struct NAME(tile) *t, const char *a, float *c) {
    if (rows == FEW_ROWS && dim == 64)
        NAME(run_long)(FEW_ROWS, which, 64, t, a, c);
    else if (rows == FEW_ROWS && dim == 128)
        NAME(run_long)(FEW_ROWS, which, 128, t, a, c);
    else
        switch (rows) {
            LONG_CASE(1) LONG_CASE(2) LONG_CASE(3) LONG_CASE(4) LONG_CASE(5) LONG_CASE(6)
        }
}
#undef LONG_CASE

TARGET static void NAME(four_blocks)(int rows, const struct NAME(tile) *t, const char *a, float *c) {
    if (t->which == KEYS)
        NAME(long_rows)(rows, KEYS, 2 * t->pairs, t, a, c);
    else if (t->which == VALUES)
        NAME(long_rows)(rows, VALUES, (int)t->c_stride, t, a, c);
    else
        CASES(4)
}
#undef CASES
#undef CASE
#endif

/* Run a tile of rows over at most `blocks` blocks of columns, and return over how many. */
INLINE int NAME(run_blocks)(int rows, int blocks, int wide, const struct NAME(tile) *t, const char *a, float *c) {
#if BYTES
    if (!wide && rows <= FEW_ROWS && blocks >= 4) {
        NAME(four_blocks)(rows, t, a, c);
        return 4;
    }
    if (!wide && rows <= FEW_ROWS && blocks >= 2) {
        NAME(two_blocks)(rows, t, a, c);
        return 2;
    }
#endif
    (wide ? NAME(wide_tile) : NAME(narrow_tile))(rows, t, a, c);
    return 1;
}

/* Run tiles over any number of rows and of blocks of columns; `a` and `c` point to the first row. */
INLINE void NAME(run_tiles)(int rows, int blocks, int wide, struct NAME(tile) t, const char *a, float *c) {
    const int most = DOTS && !wide && blocks > 1 ? FEW_ROWS : MAX_TILE;
    for (int r = 0; r < rows; r += most, a += most * t.a_stride, c += most * t.c_stride) {
        const int some = rows - r < most ? rows - r : most;
#if LANES == 8 && HAS_MAX
        if (!wide)
            (t.a_stride == 4 * SPAN ? NAME(span_columns) : NAME(columns))(some, blocks, &t, a, c);
        else
#endif
            for (t.column = 0; t.column < blocks;)
                t.column += NAME(run_blocks)(some, blocks - t.column, wide, &t, a, c + t.column * BLOCK);
        t.next = t.b; /* in the L1 cache: nothing to do */
    }
}

/*
 * 2^x for x <= 0, or little more: 2^n times a polynomial on [-1/2, 1/2] (relative error 2e-7); clamped at -126. Large x,
 * as in lanes beyond the last key, which the caller replaces, gives any number. NaN stays NaN: the maximum returns its
 * second operand then, and a product preserves NaN, which adding exponent bits would not.
 */
INLINE vec NAME(exp2)(vec x) {
    x = NAME(max)(NAME(splat)(-126.0f), x);
#if HAS_MAX && LANES == 16
    vec shifted = (vec)_mm512_roundscale_ps((__m512)x, 0), f = x - shifted; /* the same bits in fewer instructions */
#else
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vec shifted = x + magic, f = x - (shifted - magic);
#endif
    vec p = f * 1.535336188e-4f + 1.339887440e-3f;
    p = p * f + 9.618437357e-3f;
    p = p * f + 5.550332471e-2f;
    p = p * f + 2.402264791e-1f;
    p = p * f + 6.931472028e-1f;
    p = p * f + 1.0f;
#if HAS_MAX && LANES == 16
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)shifted);
#endif
    return p * (vec)(((uints)shifted << 23) + 0x3f800000); /* exact: the factor is a power of two */
}
