/*
 * Products of a few rows with weights of 4 bits, evenly spaced, or of 8; included for AVX2, by quantized.h.
 *
 * What run_codes computes, in the same order, and so the same bits. Each number of rows has a function of its own, as GCC
 * keeps sums in registers in small functions alone, and one or two rows are multiplied with two panels at once: a sum
 * waits for its last product, and others are computed meanwhile.
 *
 * A code of 4 bits becomes a float where it is in its word: a mask, the bits of a power of two above it, and that power
 * subtracted with the base of the levels. All of it is exact.
 */
struct NAME(nibbles) {
    ints mask[4], power[4]; /* by the pair in a quad */
    vec zero[4];
};

INLINE void NAME(load_nibbles)(const struct format *f, struct NAME(nibbles) *n) {
    for (int p = 0; p < 4; p++) {
        const vec power = NAME(splat)((float)(1 << (23 - 4 * p)));
        n->mask[p] = (15 << 4 * p) - (ints){0};
        n->power[p] = (ints)power;
        n->zero[p] = power - (float)f->base;
    }
    __asm__ volatile("" ::"r"(n) : "memory"); /* they are read from there: registers are for sums */
}

/* Multiply a group of some panels by a tile of rows; the sums are returned in `s`. */
INLINE void NAME(sum_group)(const int rows, const int vectors, const int bits, const struct NAME(nibbles) *n,
                            const char *codes, int64_t panel_step, const char *a, int64_t a_stride,
                            vec s[MAX_TILE][2 * VECTORS]) {
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++)
            s[r][v] = NAME(splat)(0);
    ROLLED for (int quad = 0; quad < 4; quad++, codes += 16 * bits, a += 32) {
        uints words[2 * VECTORS];
        UNROLL for (int v = 0; v < vectors && bits == 4; v++)
            words[v] = (uints)((const ints_at *)(codes + v / VECTORS * panel_step))[v % VECTORS];
        UNROLL for (int i = 0; i < 8; i++) {
            const int p = i / 2, odd = i % 2;
            vec column[2 * VECTORS];
            UNROLL for (int v = 0; v < vectors; v++)
                if (bits == 4)
                    column[v] = (vec)(((ints)(words[v] >> 16 * odd) & n->mask[p]) | n->power[p]) - n->zero[p];
                else
                    column[v] = __builtin_convertvector(
                        NAME(code)(8, p, odd, codes + v / VECTORS * panel_step, 0, v % VECTORS), vec);
            UNROLL for (int r = 0; r < rows; r++) {
                const vec factor = NAME(splat)(*(const float *)(a + r * a_stride + 4 * i));
                UNROLL for (int v = 0; v < vectors; v++)
                    s[r][v] += factor * column[v];
            }
        }
    }
}

enum { NAME(PLAIN), NAME(NESTED), NAME(WIDE) }; /* kinds of scales and minima */

/* Return the scales, or minima, of LANES outputs of a group; `outer` are the block's, or the factors of nested ones. */
INLINE vec NAME(scale_of)(const int kind, const char *numbers, const char *outer, int vector) {
    if (kind == NAME(WIDE))
        return NAME(at)(outer, vector);
    return kind == NAME(NESTED) ? NAME(halves)(outer, vector) * NAME(small)(numbers, vector)
                                : NAME(halves)(numbers, vector);
}

/* Add a scaled group to the sums of a tile. */
INLINE void NAME(add_group)(const int rows, const int vectors, const int kind, int64_t panel_step, const char *numbers,
                            const char *outer, const vec s[MAX_TILE][2 * VECTORS], float *c, int64_t c_stride) {
    UNROLL for (int v = 0; v < vectors; v++) {
        const int64_t at = v / VECTORS * panel_step;
        const vec scale = NAME(scale_of)(kind, numbers + at, outer + at, v % VECTORS);
        UNROLL for (int r = 0; r < rows; r++)
            ((vec_at *)(c + r * c_stride))[v] += scale * s[r][v];
    }
}

/*
 * Multiply some blocks of one or two panels from `b` on by a tile of rows. Of the last groups, `skip` bytes further are
 * prefetched: 0, or what lies between the panels and those that are multiplied next.
 */
INLINE void NAME(run_few)(const int rows, const int panels, const int bits, const struct NAME(quantized_tile) *t,
                          const char *b, int64_t panel_step, int64_t skip, const char *a, float *c) {
    enum { AHEAD = 6 }; /* groups that are prefetched */
    const struct format *f = t->format;
    const int vectors = panels * VECTORS, codes = code_bytes(bits), size = scale_bytes(f), has_minimum = f->has_minimum;
    const int group = codes + size * (1 + has_minimum), header = header_bytes(f), groups = block_groups(f);
    const int kind = f->wide ? NAME(WIDE) : f->nested ? NAME(NESTED) : NAME(PLAIN), factor = header / (1 + has_minimum);
    const int64_t a_stride = t->a_stride, c_stride = t->c_stride, sums_stride = t->sums_stride, blocks = t->blocks;
    const float *sums = t->sums;
    int64_t left = blocks * groups;
    struct NAME(nibbles) n;
    NAME(load_nibbles)(f, &n);
    if (t->fresh)
        for (int r = 0; r < rows; r++)
            memset(c + r * c_stride, 0, 4 * BLOCK * panels);
    for (int64_t block = 0; block < blocks; block++) {
        const char *outer = b;
        b += header;
        for (int g = 0; g < groups; g++, b += group, a += 4 * GROUP_INPUTS, sums++) {
            vec s[MAX_TILE][2 * VECTORS];
            const char *next = b + AHEAD * group + (--left < AHEAD ? skip : 0);
            UNROLL for (int panel = 0; panel < panels; panel++)
                ROLLED for (int line = 0; line < group; line += 64)
                    __builtin_prefetch(next + panel * panel_step + line);
            NAME(sum_group)(rows, vectors, bits, &n, b, panel_step, a, a_stride, s);
            UNROLL for (int which = 0; which < 2; which++) { /* scales, minima */
                const char *numbers = b + codes + which * size, *own = outer + which * factor;
                if (which > has_minimum)
                    break;
                if (which)
                    UNROLL for (int r = 0; r < rows; r++)
                        UNROLL for (int v = 0; v < vectors; v++)
                            s[r][v] = NAME(splat)(sums[r * sums_stride]);
                if (kind == NAME(PLAIN))
                    NAME(add_group)(rows, vectors, NAME(PLAIN), panel_step, numbers, own, s, c, c_stride);
                else if (kind == NAME(NESTED))
                    NAME(add_group)(rows, vectors, NAME(NESTED), panel_step, numbers, own, s, c, c_stride);
                else
                    NAME(add_group)(rows, vectors, NAME(WIDE), panel_step, numbers, own, s, c, c_stride);
            }
        }
    }
}

#define FEW(rows, panels, bits)                                                                                    \
    NOINLINE static void NAME(few_##rows##_##bits)(const struct NAME(quantized_tile) *t, const char *b,            \
                                                   int64_t panel_step, int64_t skip, const char *a, float *c) {    \
        NAME(run_few)(rows, panels, bits, t, b, panel_step, skip, a, c);                                           \
    }
FEW(1, 2, 4) FEW(2, 2, 4) FEW(3, 1, 4) FEW(4, 1, 4)
FEW(1, 1, 8) FEW(2, 1, 8) FEW(3, 1, 8) FEW(4, 1, 8)
#undef FEW

/* Whether such a function multiplies these weights. */
INLINE int NAME(has_few)(const struct format *f) { return f->bits == 8 || (f->bits == 4 && f->base <= 0); }

/* Multiply any number of rows with one or two panels, `panel_step` bytes apart; see `run_few`. */
NOINLINE static void NAME(few_rows)(int rows, int panels, struct NAME(quantized_tile) t, int64_t panel_step,
                                    int64_t skip, const char *a, float *c) {
    typedef void few(const struct NAME(quantized_tile) *, const char *, int64_t, int64_t, const char *, float *);
    static few *const all[2][5] = {{0, NAME(few_1_4), NAME(few_2_4), NAME(few_3_4), NAME(few_4_4)},
                                   {0, NAME(few_1_8), NAME(few_2_8), NAME(few_3_8), NAME(few_4_8)}};
    for (int some; rows; rows -= some) {
        some = rows < 4 ? rows : 4;
        const int joint = some < 3 && t.format->bits == 4 ? 2 : 1;
        for (int panel = 0; panel < panels; panel += joint)
            all[t.format->bits == 8][some](&t, t.panel + panel * panel_step, panels == 2 ? panel_step : 0,
                                           joint == 2 ? skip : 0, a, c + panel * BLOCK);
        a += some * t.a_stride, c += some * t.c_stride, t.sums += some * t.sums_stride;
    }
}
