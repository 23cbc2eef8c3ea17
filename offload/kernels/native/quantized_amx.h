/*
 * Products with quantised weights by AMX; the layout is in types.h.
 *
 * The levels of a few groups of a panel become bf16 in memory, once for up to TILE_GROUP rows. An instruction multiplies
 * the inputs of one scale, and the products are scaled and summed in the order of the inputs, whatever the number of
 * rows. An instruction takes as long for one row as for sixteen. So where a format has a scale for 16 inputs, each of up
 * to SPREAD_ROWS rows becomes two, one for either half of 32 inputs, with zeros for the other half: the same sums.
 */
/* Return the scales or minima of a group's outputs: `outer` is the block's, or a factor of those of all its groups. */
INLINE vec scale_of(const struct format *f, vec outer, const char *own) {
    return f->wide ? outer : f->nested ? outer * small_avx512(own, 0) : halves_avx512(own, 0);
}

/* Read what a block begins with: its wide scales and minima, or the factors of the nested ones. */
INLINE void load_header(const struct format *f, const char *b, vec outer[2]) {
    int second = f->has_minimum ? header_bytes(f) / 2 : 0;
    if (f->nested)
        outer[0] = halves_avx512(b, 0), outer[1] = halves_avx512(b + second, 0);
    else if (f->wide)
        outer[0] = *(const vec_at *)b, outer[1] = *(const vec_at *)(b + second);
}

/* Dequantise group `g` of a chunk, at `b`, to w->levels, w->scales and w->minima. `bits` is a constant. */
INLINE void expand_group(const int bits, const struct format *f, const struct tables_avx512 *tables, const vec outer[2],
                         struct tile_linear_work *w, const char *b, int g) {
    const int halves = bits == 6 ? 2 : 1, codes = code_bytes(bits), size = scale_bytes(f);
    const char *scales = b + codes, *minima = scales + halves * size;
    ints_at *to = (ints_at *)w->levels + 16 * g;
    UNROLL for (int line = 0; line < codes; line += 64)
        __builtin_prefetch(b + 6 * group_bytes(f) + line);
    _Pragma("GCC unroll 1") for (int quad = 0; quad < 4; quad++) {
        struct quad_avx512 q = load_quad_avx512(bits, b, quad);
        UNROLL for (int p = 0; p < 4; p++)
            to[4 * quad + p] = value_pair_avx512(bits, p, tables, b, quad, q);
    }
    UNROLL for (int half = 0; half < halves; half++, scales += size)
        *(vec_at *)w->scales[halves * g + half] = scale_of(f, outer[0], scales);
    if (f->has_minimum)
        *(vec_at *)w->minima[g] = scale_of(f, outer[1], minima);
}

/* Write each row of a chunk as two, of either half of each group's inputs. */
INLINE void spread_rows(struct tile_linear_work *w, const char *x, int64_t stride, int rows, int groups) {
    const ints lower = {-1, -1, -1, -1, -1, -1, -1, -1};
    for (int g = 0; g < groups; g++)
        for (int r = 0; r < rows; r++) {
            ints all = *(const ints_at *)(x + r * stride + 2 * GROUP_INPUTS * g);
            *(ints_at *)w->spread[g][2 * r] = all & lower;
            *(ints_at *)w->spread[g][2 * r + 1] = all & ~lower;
        }
}

/* Rows of activations as tiles: the first at `rows`, `stride` bytes apart, and the next step's `step` bytes further. */
struct tile_inputs {
    const char *rows;
    int64_t stride, step;
};

/* Multiply the levels of one step with up to 16 rows, into w->products[step][row]. */
#define MULTIPLY(c, a, b, row)                                                                                     \
    TILE_LOAD(a, x.rows + (row) * x.stride + step * x.step, x.stride);                                             \
    TILE_ZERO(c);                                                                                                  \
    TILE_DOT(c, a, b);                                                                                             \
    TILE_STORE(c, (char *)w->products[step][row], 64);

/* The same with up to TILE_ROWS rows. Consecutive steps use other registers, so that they overlap. */
INLINE void tile_step(const int two, const int pairs, struct tile_linear_work *w, struct tile_inputs x, int step) {
    const char *levels = (const char *)w->levels + 64 * pairs * step;
    TILE_FENCE();
    if (step % 2)
        TILE_LOAD(7, levels, 64);
    else
        TILE_LOAD(6, levels, 64);
    switch (2 * (step % 2) + two) {
        case 0: MULTIPLY(0, 4, 6, 0) break;
        case 1: MULTIPLY(0, 4, 6, 0) MULTIPLY(2, 5, 6, 16) break;
        case 2: MULTIPLY(1, 5, 7, 0) break;
        case 3: MULTIPLY(1, 4, 7, 0) MULTIPLY(3, 5, 7, 16) break;
    }
}
#undef MULTIPLY

/* What is left of a chunk's linears after the tiles: products and scales to add to rows of c. */
struct tile_scaling {
    int groups, halves, spread; /* spread: products[group][2 * row + half], else products[halves * group + half][row] */
    int has_minimum, fresh;
    const float *sums; /* of the first row's groups of activations */
    int64_t sums_stride;
};

/* Add the products times their scales to `rows` rows of c from `first` on, and the minima times the sums. */
INLINE void scale_rows(const int rows, const struct tile_linear_work *w, const struct tile_scaling *t, int first,
                       float *c) {
    vec total[8];
    UNROLL for (int i = 0; i < rows; i++)
        total[i] = t->fresh ? (vec){0} : NAME(at)(c + i * 2 * BLOCK, 0);
    const int64_t each = t->spread ? 2 * BLOCK : BLOCK, step = t->spread ? BLOCK : TILE_ROWS * BLOCK;
    for (int g = 0; g < t->groups; g++) {
        const float *products = w->products[t->spread ? g : t->halves * g][0] + first * each;
        for (int half = 0; half < t->halves; half++, products += step)
            UNROLL for (int i = 0; i < rows; i++)
                total[i] += *(const vec_at *)w->scales[t->halves * g + half] * *(const vec_at *)(products + i * each);
        if (t->has_minimum)
            UNROLL for (int i = 0; i < rows; i++)
                total[i] += *(const vec_at *)w->minima[g] * NAME(splat)(t->sums[(first + i) * t->sums_stride + g]);
    }
    UNROLL for (int i = 0; i < rows; i++)
        *(vec_at *)(c + i * 2 * BLOCK) = total[i];
}

#define PART(count)                                                                                                \
    for (; rows - r >= count; r += count)                                                                          \
        scale_rows(count, w, t, r, c + r * 2 * BLOCK);
INLINE void scale_products(const struct tile_linear_work *w, const struct tile_scaling *t, int rows, float *c) {
    int r = 0;
    PART(8) PART(4) PART(2) PART(1)
}
#undef PART

/*
 * Multiply one chunk of a panel with up to TILE_ROWS rows, in one or two steps for a group; dequantise it meanwhile from
 * `b`, unless that is NULL.
 */
INLINE void multiply_chunk(const int bits, const int two, const int steps, const struct format *f,
                           struct tile_linear_work *w, const char *b, struct tile_inputs x, int groups) {
    const struct tables_avx512 tables = load_tables_avx512(f);
    vec outer[2] = {0};
    for (int g = 0; g <= groups; g++) {
        if (b && g < groups) {
            if (g % block_groups(f) == 0) {
                load_header(f, b, outer);
                b += header_bytes(f);
            }
            expand_group(bits, f, &tables, outer, w, b, g);
            b += group_bytes(f);
        }
        UNROLL for (int s = 0; s < steps; s++) /* one group behind: its levels have reached the cache */
            if (g)
                tile_step(two, 16 / steps, w, x, steps * (g - 1) + s);
    }
}

/* Multiply one panel of quantised weights with a group of rows, into `c` of rows of 2 * BLOCK. `bits` is a constant. */
INLINE void quantized_panel(const int bits, const struct linear *l, struct tile_linear_work *w, const char *b,
                            const char *x, const float *sums, int rows, float *c) {
    const struct format *f = l->format;
    const int halves = bits == 6 ? 2 : 1;
    int64_t groups = l->inputs / GROUP_INPUTS, stride = 2 * l->inputs;
    int64_t chunk_bytes = CHUNK / block_groups(f) * block_bytes(f);
    struct tile_scaling t = {.halves = halves, .spread = halves > 1 && rows <= SPREAD_ROWS,
                             .has_minimum = f->has_minimum, .sums_stride = groups};
    for (int64_t g = 0; g < groups; g += CHUNK, b += chunk_bytes) {
        t.groups = groups - g < CHUNK ? (int)(groups - g) : CHUNK;
        t.fresh = g == 0;
        for (int r = 0; r < rows; r += TILE_ROWS) {
            int now = rows - r < TILE_ROWS ? rows - r : TILE_ROWS;
            struct tile_inputs a = {x + r * stride + 2 * GROUP_INPUTS * g, stride, 2 * GROUP_INPUTS / halves};
            const char *packed = r ? NULL : b;
            if (t.spread) {
                spread_rows(w, a.rows, stride, now, t.groups);
                use_shapes(w, 2 * now, 16);
                a = (struct tile_inputs){(const char *)w->spread, sizeof **w->spread, sizeof *w->spread};
                multiply_chunk(bits, 0, 1, f, w, packed, a, t.groups);
            } else {
                use_shapes(w, now, 16 / halves);
                if (now > 16)
                    multiply_chunk(bits, 1, halves, f, w, packed, a, t.groups);
                else
                    multiply_chunk(bits, 0, halves, f, w, packed, a, t.groups);
            }
            t.sums = sums + r * groups + g;
            scale_products(w, &t, now, c + r * 2 * BLOCK);
        }
    }
}

#define WIDTH(name, bits)                                                                                          \
    TARGET static void quantized_panel_##name(const struct linear *l, struct tile_linear_work *w, const char *b,   \
                                              const char *x, const float *sums, int rows, float *c) {              \
        quantized_panel(bits, l, w, b, x, sums, rows, c);                                                          \
    }
WIDTH(4, 4) WIDTH(5, 5) WIDTH(6, 6) WIDTH(8, 8) WIDTH(float8, FLOAT8)
#undef WIDTH

/* Multiply one or two panels of quantised weights with a group of rows, into w->c. */
INLINE void quantized_panels(const struct linear *l, struct tile_linear_work *w, const char *x, const float *sums,
                             int rows, int64_t panel, int panels) {
    int64_t inputs = block_groups(l->format) * GROUP_INPUTS; /* of a block */
    int64_t bytes = l->inputs / inputs * block_bytes(l->format);
    for (int p = 0; p < panels; p++) {
        const char *b = l->weight + (panel + p) * bytes;
        float *c = w->c + p * BLOCK;
        switch (l->format->bits) {
            case 4: quantized_panel_4(l, w, b, x, sums, rows, c); break;
            case 5: quantized_panel_5(l, w, b, x, sums, rows, c); break;
            case 6: quantized_panel_6(l, w, b, x, sums, rows, c); break;
            case 8: quantized_panel_8(l, w, b, x, sums, rows, c); break;
            case FLOAT8: quantized_panel_float8(l, w, b, x, sums, rows, c); break;
        }
    }
}
