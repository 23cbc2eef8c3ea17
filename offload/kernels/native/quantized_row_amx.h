/*
 * Products of one or two rows with quantised weights beside AMX, whose instructions take as long for one row as for
 * sixteen: by vector instructions, in the tiles' order and with their bits.
 *
 * A tile product sums the even and the odd members of the pairs in one chain of fused multiply-adds each, and adds the
 * two sums. It takes subnormal numbers for zero; so rows with such numbers, or ones so small that a product or a sum
 * could be one, are left to the tiles, like those that are not finite.
 */
enum { VECTOR_ROWS = 2, SMALLEST_EXPONENT = 127 - 90 };

/* Widen rows to fp32. Returns whether each number is zero, or finite and not too small. */
INLINE int widen_plain(const uint16_t *x, int64_t count, float *to) {
    ints bad = {0};
    for (int64_t i = 0; i < count; i += BLOCK) {
        ints bits = (ints)load_avx512(x, i, 0), exponent = bits >> 23 & 255;
        *(ints_at *)(to + i) = bits;
        bad |= ((bits & 0x7fffffff) != 0) & ((exponent < SMALLEST_EXPONENT) | (exponent == 255));
    }
    for (int i = 0; i < LANES; i++)
        if (bad[i])
            return 0;
    return 1;
}

/* Multiply one panel with rows of `inputs` floats at `x`, into `c` of rows of 2 * BLOCK. `rows` and `bits` are constants. */
INLINE void vector_panel(const int rows, const int bits, const struct format *f, int64_t inputs, const char *b,
                         const float *x, const float *sums, float *c) {
    const int halves = bits == 6 ? 2 : 1, quads = 4 / halves, codes = code_bytes(bits), size = scale_bytes(f);
    const int64_t groups = inputs / GROUP_INPUTS;
    const struct tables_avx512 tables = load_tables_avx512(f);
    vec outer[2] = {0}, total[VECTOR_ROWS] = {0};
    for (int64_t g = 0; g < groups; g++, b += group_bytes(f)) {
        if (g % block_groups(f) == 0) {
            load_header(f, b, outer);
            b += header_bytes(f);
        }
        UNROLL for (int line = 0; line < codes; line += 64)
            __builtin_prefetch(b + 8 * group_bytes(f) + line);
        const char *scales = b + codes;
        UNROLL for (int half = 0; half < halves; half++, scales += size) {
            vec even[VECTOR_ROWS] = {0}, odd[VECTOR_ROWS] = {0};
            UNROLL for (int i = 0; i < quads; i++) {
                const int quad = half * quads + i;
                struct quad_avx512 q = load_quad_avx512(bits, b, quad);
                UNROLL for (int p = 0; p < 4; p++) {
                    ints pair = value_pair_avx512(bits, p, &tables, b, quad, q);
                    vec low = low_half_avx512(pair), high = high_half_avx512(pair);
                    UNROLL for (int r = 0; r < rows; r++) {
                        const float *factors = x + r * inputs + g * GROUP_INPUTS + 8 * quad + 2 * p;
                        even[r] += low * factors[0];
                        odd[r] += high * factors[1];
                    }
                }
            }
            vec scale = scale_of(f, outer[0], scales);
            UNROLL for (int r = 0; r < rows; r++)
                total[r] += scale * (even[r] + odd[r]);
        }
        if (f->has_minimum) {
            vec least = scale_of(f, outer[1], scales);
            UNROLL for (int r = 0; r < rows; r++)
                total[r] += least * splat_avx512(sums[r * groups + g]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        *(vec_at *)(c + r * 2 * BLOCK) = total[r];
}

#define WIDTH(name, bits)                                                                                          \
    TARGET static void vector_panel_##name(int rows, const struct linear *l, const char *b, const float *x,        \
                                           const float *sums, float *c) {                                          \
        if (rows == 1)                                                                                             \
            vector_panel(1, bits, l->format, l->inputs, b, x, sums, c);                                            \
        else                                                                                                       \
            vector_panel(2, bits, l->format, l->inputs, b, x, sums, c);                                            \
    }
WIDTH(4, 4) WIDTH(5, 5) WIDTH(6, 6) WIDTH(8, 8) WIDTH(float8, FLOAT8)
#undef WIDTH

/* Multiply pairs of panels with all rows, of which there are one or two, widened. */
TARGET static int vector_panels(const void *context, int64_t first, int64_t last) {
    const struct linear_job_avx512 *j = context;
    const struct linear *l = j->l;
    const int rows = (int)l->rows, block = block_groups(l->format) * GROUP_INPUTS;
    const int64_t bytes = l->inputs / block * block_bytes(l->format); /* of a panel */
    float c[VECTOR_ROWS][2 * BLOCK];
    for (int64_t column = first * 2 * BLOCK; column < last * 2 * BLOCK && column < l->outputs; column += 2 * BLOCK) {
        int columns = l->outputs - column < 2 * BLOCK ? (int)(l->outputs - column) : 2 * BLOCK;
        for (int i = 0; i < columns; i += BLOCK) {
            const char *b = l->weight + (column + i) / BLOCK * bytes;
            switch (l->format->bits) {
                case 4: vector_panel_4(rows, l, b, j->widened, j->sums, c[0] + i); break;
                case 5: vector_panel_5(rows, l, b, j->widened, j->sums, c[0] + i); break;
                case 6: vector_panel_6(rows, l, b, j->widened, j->sums, c[0] + i); break;
                case 8: vector_panel_8(rows, l, b, j->widened, j->sums, c[0] + i); break;
                case FLOAT8: vector_panel_float8(rows, l, b, j->widened, j->sums, c[0] + i); break;
            }
        }
        epilogue_avx512(l, c[0], 0, rows, column, columns);
    }
    return 0;
}
