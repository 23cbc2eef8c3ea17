/*
 * Tiles of products with quantised weights. Included once per level, after tile.h; the layout is in types.h.
 *
 * A group's codes become bf16 values (exactly) in registers, and are multiplied with the activations; the group's sums
 * are then multiplied by its scale, and the minimum by the sum of the group's activations. The order is that of the
 * inputs, whatever the number of rows: a row's result does not depend on the other rows of the tile.
 */
struct NAME(quantized_tile) {
    const struct format *format;
    const char *panel;    /* the first of the groups */
    int64_t blocks;       /* to multiply */
    int64_t a_stride;     /* bytes between rows of activations: pairs as in `struct tile` */
    const float *sums;    /* of each row's groups of activations */
    int64_t sums_stride;  /* floats */
    int64_t c_stride;     /* floats */
    int fresh;            /* 1: replace `c`, 0: add to it */
};

/* Widen LANES fp16 numbers; they are finite. */
INLINE vec NAME(halves)(const char *memory, int vector) {
#if HAS_MAX && LANES == 16
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)memory + vector));
#else
    ints bits = NAME(shorts)(memory + 2 * LANES * vector);
    vec size = (vec)((bits & 0x7fff) << 13) * 0x1p112f; /* the exponent's bias: 127 - 15; exact */
    return (vec)((ints)size | (bits & 0x8000) << 16);
#endif
}

/* Convert LANES small integers of 8 bits. */
INLINE vec NAME(small)(const char *memory, int vector) {
#if HAS_MAX && LANES == 4
    int32_t word;
    memcpy(&word, memory + 4 * vector, 4);
    return (vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8((uint32_t)word)))));
#else
    typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
    return __builtin_convertvector(((const bytes *)memory)[vector], vec);
#endif
}

/* Widen e4m3 numbers, exactly, without fp32's subnormal numbers, which processors multiply slowly; sign bits extended. */
INLINE vec NAME(float8)(ints code) {
    ints size = code & 0x7f, subnormal = size < 8;
    vec whole = (vec)((size << 20) + (120 << 23) + (subnormal & 1 << 23)); /* the exponent's bias: 127 - 7 */
    whole -= (vec)(subnormal & 0x3c800000); /* 2^-6: a subnormal number has no leading 1 */
    return (vec)((ints)whole | (code & (int32_t)0x80000000));
}

/* The bits above the low four of a quad's codes; a quad is four pairs of inputs. `bits` is a constant. */
#define HIGH_BITS(bits, quad) ((bits) == 6 ? 256 + 64 * ((quad) / 2) : 256)
#define HIGH_SHIFT(bits, quad) ((bits) == 6 ? 8 * ((quad) % 2) : 4 * (quad))
#define HIGH_EACH(bits) ((bits) == 6 ? 2 : 1)

#if BYTES && !defined(TRIFORCE_EMULATE)
struct NAME(tables) { /* a format's levels, in registers */
    __m512i levels[2];
};

INLINE struct NAME(tables) NAME(load_tables)(const struct format *f) {
    return (struct NAME(tables)){{_mm512_loadu_si512(f->levels), _mm512_loadu_si512(f->levels + 32)}};
}

struct NAME(quad) { /* the low four bits of a quad's codes, and if there are others the word that has them */
    __m512i low, high;
};

INLINE struct NAME(quad) NAME(load_quad)(const int bits, const char *codes, int quad) {
    __m512i low = _mm512_loadu_si512(codes + 64 * quad), high = low;
    if (bits == 5 || bits == 6)
        high = _mm512_srl_epi16(_mm512_loadu_si512(codes + HIGH_BITS(bits, quad)),
                                _mm_cvtsi32_si128(HIGH_SHIFT(bits, quad)));
    return (struct NAME(quad)){low, high};
}

/* Convert 32 e4m3 numbers, of 16 bits each, to bf16, exactly: the exponent's bias grows by 120, and a table has the subnormal ones. */
INLINE ints NAME(float8_pair)(__m512i code, __m512i subnormal) {
    __m512i size = _mm512_and_si512(code, _mm512_set1_epi16(0x7f));
    __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
    __m512i value = _mm512_mask_permutexvar_epi16(normal, _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8)), size,
                                                  subnormal);
    __m512i sign = _mm512_slli_epi16(code, 8);
    return (ints)_mm512_ternarylogic_epi32(_mm512_set1_epi16((short)0x8000), sign, value, 0xea); /* sign bit | value */
}

/* Return pair `p` of a quad, for 16 outputs: two bf16 in each lane. `bits` and `p` are constants. */
INLINE ints NAME(value_pair)(const int bits, const int p, const struct NAME(tables) *tables, const char *codes,
                             int quad, struct NAME(quad) q) {
    if (bits == FLOAT8)
        return NAME(float8_pair)(
            _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(codes + 128 * quad + 32 * p))), tables->levels[0]);
    if (bits == 8) { /* two conversions of 16 integers, narrowed to 32 bf16 in order: exact below 2^8 */
        const __m128i *at = (const __m128i *)(codes + 128 * quad + 32 * p);
        __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
        __m512 second = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at + 1)));
        return (ints)_mm512_cvtne2ps_pbh(second, first);
    }
    __m512i index = _mm512_srli_epi16(q.low, 4 * p), high = q.high;
    if (bits == 4) /* the table holds the levels twice: the bit above the code does not matter */
        return (ints)_mm512_permutexvar_epi16(index, tables->levels[0]);
    const int at = HIGH_EACH(bits) * p; /* where the code's high bits are; they move to bit 4 */
    high = at > 4 ? _mm512_srli_epi16(high, at - 4) : _mm512_slli_epi16(high, 4 - at);
    index = _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), index, high, 0xca); /* 15 ? index : high */
    if (bits == 5)
        return (ints)_mm512_permutexvar_epi16(index, tables->levels[0]);
    return (ints)_mm512_permutex2var_epi16(tables->levels[0], index, tables->levels[1]);
}
#else
/* Return code `odd` of pair `p` of a quad, for LANES outputs. */
INLINE ints NAME(code)(const int bits, int p, const int odd, const char *codes, int quad, int vector) {
    if (bits >= 8) {
        ints both = NAME(shorts)(codes + 128 * quad + 32 * p + 2 * LANES * vector);
        return odd ? both >> 8 : both << 24 >> 24;
    }
    ints code = ((const ints_at *)(codes + 64 * quad))[vector] >> (16 * odd + 4 * p) & 15;
    if (bits > 4) {
        int shift = 16 * odd + HIGH_SHIFT(bits, quad) + HIGH_EACH(bits) * p;
        ints high = ((const ints_at *)(codes + HIGH_BITS(bits, quad)))[vector] >> shift;
        code |= (high & (bits == 6 ? 3 : 1)) << 4;
    }
    return code;
}

/* Return the levels of codes that are not evenly spaced. */
#if HAS_MAX && LANES == 8
INLINE vec NAME(uneven)(const struct format *f, ints code) {
    const __m256i index = (__m256i)code;
    const __m256 low = _mm256_permutevar8x32_ps((__m256)NAME(load)(f->levels, 0, 0), index);
    const __m256 high = _mm256_permutevar8x32_ps((__m256)NAME(load)(f->levels, 8, 0), index);
    return (vec)_mm256_blendv_ps(low, high, (__m256)(code << 28)); /* by the code's highest bit */
}
#elif HAS_MAX && LANES == 4
INLINE vec NAME(uneven)(const struct format *f, ints code) { /* two bytes of the table each; others are 0 */
    uint8x16x2_t levels;
    memcpy(&levels, f->levels, sizeof levels);
    return (vec)vqtbl2q_u8(levels, (uint8x16_t)((code * 0x02020000) | 0x0100ffff));
}
#else
NOINLINE static vec NAME(uneven)(const struct format *f, ints code) {
    vec value;
    for (int i = 0; i < LANES; i++)
        value[i] = widen(f->levels[code[i]]);
    return value;
}
#endif

/* Return the levels of codes. */
INLINE vec NAME(value)(const int bits, const struct format *f, ints code) {
    if (bits == FLOAT8)
        return NAME(float8)(code);
    if (bits == 8)
        return __builtin_convertvector(code, vec);
    if (bits == 4 && f->base > 0)
        return NAME(uneven)(f, code);
    return __builtin_convertvector(code, vec) + (float)f->base;
}

struct NAME(tables) {
    const struct format *format;
};

INLINE struct NAME(tables) NAME(load_tables)(const struct format *f) { return (struct NAME(tables)){f}; }

#if DOTS
struct NAME(quad) {
    char unused;
};

INLINE struct NAME(quad) NAME(load_quad)(int bits, const char *codes, int quad) { return (struct NAME(quad)){0}; }

INLINE ints NAME(value_pair)(int bits, int p, const struct NAME(tables) *tables, const char *codes, int quad,
                             struct NAME(quad) q) {
    ints even = (ints)NAME(value)(bits, tables->format, NAME(code)(bits, p, 0, codes, quad, 0));
    ints odd = (ints)NAME(value)(bits, tables->format, NAME(code)(bits, p, 1, codes, quad, 0));
    return (even >> 16 & 0xffff) | (odd & (int32_t)0xffff0000);
}
#endif
#endif

#define ROLLED _Pragma("GCC unroll 1")

/* Choose among the widths, when compiling if `bits` is a constant. */
#define EACH_WIDTH(bits, CASE)                                                                                     \
    switch (bits) {                                                                                                \
        CASE(4) CASE(5) CASE(6) CASE(8) CASE(FLOAT8)                                                               \
        default: __builtin_unreachable();                                                                          \
    }

/* Multiply some quads of a group by a tile of rows; the sums are returned in `s`. `rows` and `bits` are constants. */
INLINE void NAME(group_dots)(const int rows, const int bits, const int first, const int quads, int64_t a_stride,
                             const struct NAME(tables) *tables, const char *codes, const char *a,
                             vec s[MAX_TILE][VECTORS]) {
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++)
            s[r][v] = NAME(splat)(0);
    a += first * (DOTS ? 16 : 32);
    ROLLED for (int quad = first; quad < first + quads; quad++, a += DOTS ? 16 : 32) {
#if DOTS
        struct NAME(quad) q = NAME(load_quad)(bits, codes, quad);
        UNROLL for (int p = 0; p < 4; p++) {
            ints pair = NAME(value_pair)(bits, p, tables, codes, quad, q);
            UNROLL for (int r = 0; r < rows; r++)
                s[r][0] = NAME(dot)(s[r][0], pair, *(const NAME(pair_at) *)(a + r * a_stride + 4 * p));
        }
#else
        ROLLED for (int p = 0; p < 4; p++)
            UNROLL for (int odd = 0; odd < 2; odd++)
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    vec column = NAME(value)(bits, tables->format, NAME(code)(bits, p, odd, codes, quad, v));
                    UNROLL for (int r = 0; r < rows; r++)
                        s[r][v] += NAME(splat)(*(const float *)(a + r * a_stride + 8 * p + 4 * odd)) * column;
                }
#endif
    }
}

#define GROUP_DOTS(width)                                                                                          \
    case width: NAME(group_dots)(rows, width, half * quads, quads, t->a_stride, &tables, b, a, s); break;
/* Multiply a tile of rows with some blocks of a panel. `rows` is a constant. */
INLINE void NAME(run_codes)(const int rows, const int bits, const struct NAME(quantized_tile) *t, const char *a,
                            float *c) {
    const struct format *f = t->format;
    const int halves = bits == 6 ? 2 : 1, quads = 4 / halves; /* 6 bits: groups of 16 inputs */
    const int codes = code_bytes(bits), scales_size = scale_bytes(f);
    const int group = codes + scales_size * (halves + f->has_minimum); /* bytes */
    const char *b = t->panel;
    const float *sums = t->sums;
    const struct NAME(tables) tables = NAME(load_tables)(f);
    vec total[MAX_TILE][VECTORS], s[MAX_TILE][VECTORS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++)
            total[r][v] = t->fresh ? NAME(splat)(0) : NAME(at)(c + r * t->c_stride, v);
    for (int64_t block = 0; block < t->blocks; block++) {
        vec outer[2][VECTORS] = {0}; /* the block's wide scale and minimum, or factors of the nested ones */
        if (f->nested) {
            UNROLL for (int v = 0; v < VECTORS; v++) {
                outer[0][v] = NAME(halves)(b, v);
                outer[1][v] = f->has_minimum ? NAME(halves)(b + 2 * BLOCK, v) : outer[0][v];
            }
        } else if (f->wide) {
            UNROLL for (int v = 0; v < VECTORS; v++) {
                outer[0][v] = NAME(at)((const float *)b, v);
                outer[1][v] = f->has_minimum ? NAME(at)((const float *)b + BLOCK, v) : outer[0][v];
            }
        }
        b += header_bytes(f);
        for (int g = 0; g < block_groups(f); g++, sums++) {
            ROLLED for (int line = 0; line < codes; line += 64)
                __builtin_prefetch(b + 6 * group + line);
            const char *scales = b + codes;
            ROLLED for (int half = 0; half < halves; half++, scales += scales_size) {
#if HAS_MAX /* a loop of its own for each width */
                EACH_WIDTH(bits, GROUP_DOTS)
#else
                NAME(group_dots)(rows, bits, half * quads, quads, t->a_stride, &tables, b, a, s);
#endif
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    vec scale = f->wide     ? outer[0][v]
                                : f->nested ? outer[0][v] * NAME(small)(scales, v)
                                            : NAME(halves)(scales, v);
                    UNROLL for (int r = 0; r < rows; r++)
                        total[r][v] += scale * s[r][v];
                }
            }
            if (f->has_minimum)
                UNROLL for (int v = 0; v < VECTORS; v++) {
                    vec least = f->wide     ? outer[1][v]
                                : f->nested ? outer[1][v] * NAME(small)(scales, v)
                                            : NAME(halves)(scales, v);
                    UNROLL for (int r = 0; r < rows; r++)
                        total[r][v] += least * NAME(splat)(sums[r * t->sums_stride]);
                }
            a += DOTS ? 2 * GROUP_INPUTS : 4 * GROUP_INPUTS;
            b += group;
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < VECTORS; v++)
            ((vec_at *)(c + r * t->c_stride))[v] = total[r][v];
}

#undef GROUP_DOTS

#if DOTS && HAS_MAX
#include "quantized_plain.h"
#else
INLINE int NAME(run_if_plain)(int rows, int bits, const struct NAME(quantized_tile) *t, const char *a, float *c) { return 0; }
#endif

/*
 * Run a tile of up to MAX_TILE rows. Not every number of rows has code of its own, and only the common widths, or one
 * row: more would take long to compile. The others run in two or three parts, with the same result.
 */
#define PARTS(count, bits)                                                                                         \
    for (; rows >= count; rows -= count, a += count * t->a_stride, c += count * t->c_stride,                       \
                          t->sums += count * t->sums_stride)                                                       \
        if (!NAME(run_if_plain)(count, bits, t, a, c))                                                             \
            NAME(run_codes)(count, bits, t, a, c);
#define CASE(width) case width: if (!NAME(run_if_plain)(1, width, t, a, c)) NAME(run_codes)(1, width, t, a, c); break;
/* The same for one width, if `bits` is a constant. */
INLINE void NAME(rows_of_width)(const int bits, int rows, struct NAME(quantized_tile) *t, const char *a, float *c) {
#if LANES == 16
    PARTS(12, bits)
#endif
#if LANES == 16 && HAS_MAX
    PARTS(8, bits)
#endif
#if LANES == 8 && !HAS_MAX
    PARTS(6, bits)
#endif
#if LANES == 16 && HAS_MAX
    PARTS(6, bits) PARTS(4, bits)
#endif
#if HAS_MAX
    PARTS(3, bits) PARTS(2, bits)
    if (rows)
        EACH_WIDTH(bits, CASE)
#else /* levels for which compiling less matters more than speed */
    PARTS(1, bits)
#endif
}

TARGET static void NAME(quantized_rows)(int rows, struct NAME(quantized_tile) t, const char *a, float *c) {
#if LANES == 16 && HAS_MAX
    if (t.format->bits == 4)
        NAME(rows_of_width)(4, rows, &t, a, c);
    else if (t.format->bits == 8)
        NAME(rows_of_width)(8, rows, &t, a, c);
    else
#endif
        NAME(rows_of_width)(t.format->bits, rows, &t, a, c);
}
#undef CASE
#undef PARTS

/* Run tiles over any number of rows; `a`, `c` and t.sums belong to the first row. */
INLINE void NAME(run_quantized)(int rows, struct NAME(quantized_tile) t, const char *a, float *c) {
    for (int r = 0; r < rows; r += MAX_TILE) {
        NAME(quantized_rows)(rows - r < MAX_TILE ? rows - r : MAX_TILE, t, a, c);
        a += MAX_TILE * t.a_stride, c += MAX_TILE * t.c_stride, t.sums += MAX_TILE * t.sums_stride;
    }
}

#if HAS_MAX && LANES == 8
#include "quantized_few.h"

#include "quantized_many.h"
#endif
