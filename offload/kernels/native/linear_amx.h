/*
 * Linears by AMX, for bf16 activations; shares the sums of activations and the epilogue with the AVX-512 level.
 *
 * Each element is summed in steps of 32 inputs (16 where a quantised format has a scale for 16), each by one
 * instruction, whatever the number of rows.
 */
/* Multiply one or two panels of bf16 with up to TILE_ROWS rows; `far`: they are not in the caches yet. */
INLINE void tile_rows(const int two, const int panels, int far, const char *a, int64_t inputs, const char *b,
                      float *c) {
    int64_t panel = 2 * BLOCK * inputs, stride = 2 * inputs;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t k = 0; k < inputs; k += 32, a += 64, b += 1024) {
        for (int line = 0; far && line < 1024; line += 64) {
            __builtin_prefetch(b + 4096 + line);
            if (panels > 1)
                __builtin_prefetch(b + panel + 4096 + line);
        }
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
    for (int r = 0; r < rows; r += TILE_ROWS, x += 2 * TILE_ROWS * l->inputs) {
        int now = rows - r < TILE_ROWS ? rows - r : TILE_ROWS, far = r == 0;
        float *c = w->c + r * 2 * BLOCK;
        use_shapes(w, now, 16);
        switch (2 * (now > 16) + panels - 1) {
            case 0: tile_rows(0, 1, far, x, l->inputs, b, c); break;
            case 1: tile_rows(0, 2, far, x, l->inputs, b, c); break;
            case 2: tile_rows(1, 1, far, x, l->inputs, b, c); break;
            case 3: tile_rows(1, 2, far, x, l->inputs, b, c); break;
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
    int64_t sums = l->format && l->format->has_minimum ? l->rows * (l->inputs / GROUP_INPUTS) : 0;
    int64_t widened = l->format && l->rows <= VECTOR_ROWS ? l->rows * l->inputs : 0;
    float *memory = sums + widened ? scratch(&shared_memory, sizeof(float) * (sums + widened)) : NULL;
    if (sums + widened && !memory)
        return 1;
    j.widened = memory, j.sums = memory + widened;
    if (sums)
        run_rows(sum_groups_avx512, &j, l->rows);
    if (widened && widen_plain(l->x, widened, j.widened))
        return pool_run(vector_panels, &j, j.pairs, 0);
    int64_t groups = (l->rows + TILE_GROUP - 1) / TILE_GROUP;
    return pool_run(multiply_groups_amx, &j, groups * j.pairs, l->rows >= LONG_ROWS);
}
