/*
 * Linears by AMX, for bf16 activations; included by level.h after the AVX-512 level, with which it shares the sums of
 * activations and the epilogue.
 *
 * Each element is summed in steps of 32 inputs (16 where a quantised format has a scale for 16), each by one
 * instruction, whatever the number of rows. Quantised weights become bf16 levels once for up to TILE_GROUP rows.
 */
enum {
    TILE_GROUP = 256, /* rows that read a panel together */
    CHUNK = 8,        /* groups of quantised weights whose levels stay in the first-level cache */
};

struct tile_linear_work {
    uint16_t levels[CHUNK * GROUP_INPUTS * BLOCK];
    float products[2 * CHUNK][TILE_ROWS][BLOCK]; /* of each scale's inputs */
    float scales[2 * CHUNK][BLOCK], minima[CHUNK][BLOCK];
    float c[TILE_GROUP * 2 * BLOCK];
    int rows, pairs; /* the shapes of the tiles */
};

INLINE void use_shapes(struct tile_linear_work *w, int rows, int pairs) {
    if (w->rows == rows && w->pairs == pairs)
        return;
    set_tile_shapes(rows, pairs);
    w->rows = rows, w->pairs = pairs;
}

/* Multiply one or two panels of bf16 with up to TILE_ROWS rows. */
INLINE void tile_rows(const int two, const int panels, const char *a, int64_t inputs, const char *b, float *c) {
    int64_t panel = 2 * BLOCK * inputs, stride = 2 * inputs;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t k = 0; k < inputs; k += 32, a += 64, b += 1024) {
        TILE_LOAD(4, a, stride);
        TILE_LOAD(6, b, 64);
        TILE_DOT(0, 4, 6);
        if (panels > 1) {
            TILE_LOAD(7, b + panel, 64);
            TILE_DOT(1, 4, 7);
        }
        if (two) {
            TILE_LOAD(5, a + 16 * stride, stride);
            TILE_DOT(2, 5, 6);
            if (panels > 1)
                TILE_DOT(3, 5, 7);
        }
    }
    TILE_STORE(0, (char *)c, 8 * BLOCK);
    if (panels > 1)
        TILE_STORE(1, (char *)(c + BLOCK), 8 * BLOCK);
    if (two)
        TILE_STORE(2, (char *)(c + 32 * BLOCK), 8 * BLOCK);
    if (two && panels > 1)
        TILE_STORE(3, (char *)(c + 33 * BLOCK), 8 * BLOCK);
}

/* Multiply one or two panels of bf16 with a group of rows, into w->c. */
INLINE void tile_panels(const struct linear *l, struct tile_linear_work *w, const char *x, int rows, int64_t panel,
                        int panels) {
    const char *b = l->weight + panel * 2 * BLOCK * l->inputs;
    float *c = w->c;
    for (; rows > 0; rows -= TILE_ROWS, x += 2 * TILE_ROWS * l->inputs, c += TILE_ROWS * 2 * BLOCK) {
        int some = rows < TILE_ROWS ? rows : TILE_ROWS;
        use_shapes(w, some, 16);
        switch (2 * (some > 16) + panels - 1) {
            case 0: tile_rows(0, 1, x, l->inputs, b, c); break;
            case 1: tile_rows(0, 2, x, l->inputs, b, c); break;
            case 2: tile_rows(1, 1, x, l->inputs, b, c); break;
            case 3: tile_rows(1, 2, x, l->inputs, b, c); break;
        }
    }
}

/* Return the scales or minima of a group's 16 outputs: `outer` is the block's, or a factor of all of its groups. */
INLINE vec scale_of(const struct format *f, vec outer, const char *own) {
    return f->wide ? outer : f->nested ? outer * small_avx512(own, 0) : halves_avx512(own, 0);
}

/* Dequantise up to CHUNK groups to w->levels, w->scales and w->minima. `bits` is a constant. Returns the next block. */
INLINE const char *expand_chunk(const int bits, const struct format *f, struct tile_linear_work *w, const char *b,
                                int groups) {
    const int halves = bits == 6 ? 2 : 1, codes = code_bytes(bits), size = scale_bytes(f), each = block_groups(f);
    const int64_t group = codes + size * (halves + f->has_minimum); /* bytes */
    const struct tables_avx512 tables = load_tables_avx512(f);
    vec outer[2] = {0}; /* the block's wide scale and minimum, or factors of the nested ones */
    for (int g = 0; g < groups; g++, b += group) {
        if (g % each == 0) {
            int second = f->has_minimum ? header_bytes(f) / 2 : 0;
            if (f->nested)
                outer[0] = halves_avx512(b, 0), outer[1] = halves_avx512(b + second, 0);
            else if (f->wide)
                outer[0] = *(const vec_at *)b, outer[1] = *(const vec_at *)(b + second);
            b += header_bytes(f);
        }
        ints *to = (ints *)w->levels + 16 * g;
        UNROLL for (int line = 0; line < codes; line += 64)
            __builtin_prefetch(b + 6 * group + line);
        _Pragma("GCC unroll 1") for (int quad = 0; quad < 4; quad++) {
            struct quad_avx512 q = load_quad_avx512(bits, b, quad);
            UNROLL for (int p = 0; p < 4; p++)
                to[4 * quad + p] = value_pair_avx512(bits, p, &tables, b, quad, q);
        }
        const char *scales = b + codes, *minima = scales + halves * size;
        UNROLL for (int half = 0; half < halves; half++, scales += size)
            *(vec *)w->scales[halves * g + half] = scale_of(f, outer[0], scales);
        if (f->has_minimum)
            *(vec *)w->minima[g] = scale_of(f, outer[1], minima);
    }
    return b;
}

/* Multiply the levels of each scale's inputs with up to TILE_ROWS rows, into w->products. */
INLINE void tile_products(const int two, const int pairs, struct tile_linear_work *w, const char *a, int64_t stride,
                          int steps) {
    for (int s = 0; s < steps; s++, a += 4 * pairs) {
        TILE_LOAD(4, a, stride);
        TILE_LOAD(6, (const char *)w->levels + 64 * pairs * s, 64);
        TILE_ZERO(0);
        TILE_DOT(0, 4, 6);
        TILE_STORE(0, (char *)w->products[s], 64);
        if (two) {
            TILE_LOAD(5, a + 16 * stride, stride);
            TILE_ZERO(2);
            TILE_DOT(2, 5, 6);
            TILE_STORE(2, (char *)w->products[s][16], 64);
        }
    }
}

/* Add the products times their scales to rows of c, and the minima times the sums of activations. */
INLINE void scale_rows(const int rows, const int halves, const struct tile_linear_work *w, int r, int groups, int minima,
                       const float *sums, int64_t sums_stride, int fresh, float *c) {
    vec total[8];
    UNROLL for (int i = 0; i < rows; i++)
        total[i] = fresh ? (vec){0} : *(vec *)(c + i * 2 * BLOCK);
    for (int g = 0; g < groups; g++) {
        for (int s = halves * g; s < halves * (g + 1); s++)
            UNROLL for (int i = 0; i < rows; i++)
                total[i] += *(const vec *)w->scales[s] * *(const vec *)w->products[s][r + i];
        if (minima)
            UNROLL for (int i = 0; i < rows; i++)
                total[i] += *(const vec *)w->minima[g] * NAME(splat)(sums[i * sums_stride + g]);
    }
    UNROLL for (int i = 0; i < rows; i++)
        *(vec *)(c + i * 2 * BLOCK) = total[i];
}

#define PART(count)                                                                                                \
    for (; rows - r >= count; r += count)                                                                          \
        scale_rows(count, halves, w, r, groups, minima, sums + r * sums_stride, sums_stride, fresh, c + r * 2 * BLOCK);
INLINE void scale_products(const int halves, const struct tile_linear_work *w, int rows, int groups, int minima,
                           const float *sums, int64_t sums_stride, int fresh, float *c) {
    int r = 0;
    PART(8) PART(4) PART(2) PART(1)
}
#undef PART

/* Multiply one panel of quantised weights with a group of rows, into `c` of rows of 2 * BLOCK. `bits` is a constant. */
INLINE void quantized_panel(const int bits, const struct linear *l, struct tile_linear_work *w, const char *b,
                            const char *x, const float *sums, int rows, float *c) {
    const int halves = bits == 6 ? 2 : 1, pairs = 16 / halves;
    int64_t groups = l->inputs / GROUP_INPUTS, stride = 2 * l->inputs;
    for (int64_t g = 0; g < groups; g += CHUNK) {
        int some = groups - g < CHUNK ? (int)(groups - g) : CHUNK;
        b = expand_chunk(bits, l->format, w, b, some);
        for (int r = 0; r < rows; r += TILE_ROWS) {
            int now = rows - r < TILE_ROWS ? rows - r : TILE_ROWS;
            const char *a = x + r * stride + 2 * GROUP_INPUTS * g;
            use_shapes(w, now, pairs);
            if (now > 16)
                tile_products(1, pairs, w, a, stride, halves * some);
            else
                tile_products(0, pairs, w, a, stride, halves * some);
            scale_products(halves, w, now, some, l->format->has_minimum, sums + r * groups + g, groups, g == 0,
                           c + r * 2 * BLOCK);
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

/* Multiply groups of rows with pairs of panels, the pairs of one group after the other. */
TARGET static int multiply_groups_amx(const void *context, int64_t first_part, int64_t last_part) {
    const struct linear_job_avx512 *j = context;
    const struct linear *l = j->l;
    struct tile_linear_work *w = scratch(&own_memory, sizeof *w);
    if (!w)
        return 1;
    w->rows = 0;
    for (int64_t part = first_part; part < last_part; part++) {
        int64_t first = part / j->pairs * TILE_GROUP, column = part % j->pairs * 2 * BLOCK;
        int rows = l->rows - first < TILE_GROUP ? (int)(l->rows - first) : TILE_GROUP;
        int columns = l->outputs - column < 2 * BLOCK ? (int)(l->outputs - column) : 2 * BLOCK;
        const char *x = j->x + first * j->row_bytes;
        if (l->format)
            quantized_panels(l, w, x, j->sums + first * (l->inputs / GROUP_INPUTS), rows, column / BLOCK,
                             columns > BLOCK ? 2 : 1);
        else
            tile_panels(l, w, x, rows, column / BLOCK, columns > BLOCK ? 2 : 1);
        epilogue_avx512(l, w->c, first, rows, column, columns);
    }
    TILE_RELEASE();
    return 0;
}

TARGET static int linear_amx(const struct linear *l) {
    if (l->wide || l->inputs % 32)
        return linear_avx512(l);
    struct linear_job_avx512 j = {.l = l, .x = l->x, .row_bytes = 2 * l->inputs};
    j.pairs = (l->outputs + 2 * BLOCK - 1) / (2 * BLOCK);
    if (l->format && l->format->has_minimum) {
        j.sums = scratch(&shared_memory, sizeof(float) * l->rows * (l->inputs / GROUP_INPUTS));
        if (!j.sums)
            return 1;
        run_rows(sum_groups_avx512, &j, l->rows);
    }
    int64_t groups = (l->rows + TILE_GROUP - 1) / TILE_GROUP;
    return pool_run(multiply_groups_amx, &j, groups * j.pairs, l->rows >= LONG_ROWS);
}
