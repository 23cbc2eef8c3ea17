/*
 * Tiles of few rows with weights of which each group has an fp16 scale, and maybe a minimum (Q4_0, Q4_1, Q8_0); included by
 * quantized.h for levels with the instructions. The sums are those of `run_codes`, in the same order.
 *
 * A dot product waits for the one before it, so two groups are multiplied at once.
 */
enum { NAME(FEWEST_ROWS) = 4, NAME(AHEAD) = 1920 /* bytes of a panel that are being read */ };

/* Multiply a tile of rows with an even number of blocks of a panel. All before `t` are constants. */
INLINE void NAME(run_plain)(const int rows, const int bits, const int has_minimum, const struct NAME(quantized_tile) *t,
                            const char *a, float *c) {
    const int codes = code_bytes(bits), group = codes + 2 * BLOCK * (1 + has_minimum);
    const struct NAME(tables) tables = NAME(load_tables)(t->format);
    const char *b = t->panel;
    const float *sums = t->sums;
    vec total[NAME(FEWEST_ROWS)], s[2][NAME(FEWEST_ROWS)];
    UNROLL for (int r = 0; r < rows; r++)
        total[r] = t->fresh ? NAME(splat)(0) : NAME(at)(c + r * t->c_stride, 0);
    for (int64_t left = t->blocks; left > 0; left -= 2, a += 4 * GROUP_INPUTS) {
        UNROLL for (int line = 0; line < 2 * group; line += 64)
            __builtin_prefetch(b + NAME(AHEAD) + line);
        UNROLL for (int r = 0; r < rows; r++)
            s[0][r] = s[1][r] = NAME(splat)(0);
        UNROLL for (int quad = 0; quad < 4; quad++) {
            struct NAME(quad) both[] = {NAME(load_quad)(bits, b, quad), NAME(load_quad)(bits, b + group, quad)};
            UNROLL for (int p = 0; p < 4; p++)
                UNROLL for (int g = 0; g < 2; g++) {
                    ints pair = NAME(value_pair)(bits, p, &tables, b + g * group, quad, both[g]);
                    const char *at = a + 2 * GROUP_INPUTS * g + 16 * quad + 4 * p;
                    UNROLL for (int r = 0; r < rows; r++)
                        s[g][r] = NAME(dot)(s[g][r], pair, *(const NAME(pair_at) *)(at + r * t->a_stride));
                }
        }
        UNROLL for (int g = 0; g < 2; g++, b += group, sums++) {
            vec scale = NAME(halves)(b + codes, 0), least = has_minimum ? NAME(halves)(b + codes, 1) : scale;
            UNROLL for (int r = 0; r < rows; r++)
                total[r] += scale * s[g][r];
            UNROLL for (int r = 0; r < rows && has_minimum; r++)
                total[r] += least * NAME(splat)(sums[r * t->sums_stride]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        *(vec_at *)(c + r * t->c_stride) = total[r];
}

/* Do so if the format, the number of rows and the number of blocks allow it, and return whether they do. */
INLINE int NAME(run_if_plain)(const int rows, const int bits, const struct NAME(quantized_tile) *t, const char *a, float *c) {
    const struct format *f = t->format;
    if (!__builtin_constant_p(bits) || rows > NAME(FEWEST_ROWS) || f->nested || f->wide || t->blocks % 2)
        return 0;
    if (bits == 4 && f->has_minimum)
        NAME(run_plain)(rows, 4, 1, t, a, c);
    else if ((bits == 4 || bits == 8) && !f->has_minimum)
        NAME(run_plain)(rows, bits, 0, t, a, c);
    else
        return 0;
    return 1;
}
