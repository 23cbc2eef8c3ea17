/* The row-wise operations between two attentions: linears, norms, the gate. Included once per level, after tile.h. */
enum { NAME(GROUP) = 96, NAME(DEPTH) = 1024 }; /* rows and inputs of a product that fit the L2 cache together */

struct NAME(linear_work) {
    float c[NAME(GROUP) * 2 * BLOCK];
};

/* Multiply one or two panels with a group of rows, into w->c. */
INLINE void NAME(product)(const struct linear *l, struct NAME(linear_work) *w, const char *x, int rows, int64_t panel,
                          int panels) {
    int wide = l->wide, item = wide ? 4 : 2;
    int64_t bytes = l->inputs * BLOCK * item;
    int x_item = DOTS && !wide ? 2 : 4;
    struct NAME(tile) t = {.segments = 1, .a_stride = l->inputs * x_item, .c_stride = 2 * BLOCK};
    t.b_step = wide ? 8 * BLOCK : 4 * BLOCK;
    for (int p = 0; p < panels; p++) {
        const char *weight = l->weight + (panel + p) * bytes;
        for (int64_t k = 0; k < l->inputs; k += NAME(DEPTH)) {
            int depth = l->inputs - k < NAME(DEPTH) ? (int)(l->inputs - k) : NAME(DEPTH);
            const char *b = weight + k * BLOCK * item;
            const char *next = b + 2 * BLOCK * item * 64;
            t.b = &b, t.next = &next, t.pairs = depth / 2, t.fresh = k == 0;
            NAME(run_tiles)(rows, 1, wide, t, x + k * x_item, w->c + p * BLOCK);
        }
    }
}

/* Add bias and residual to a whole panel of one row, and store it from element `at` of y on. */
INLINE void NAME(finish_panel)(const struct linear *l, const float *c, int64_t at, int64_t column) {
    UNROLL for (int i = 0; i < BLOCK; i += LANES) {
        vec y = NAME(at)(c + i, 0) + (l->bias ? NAME(at)(l->bias + column + i, 0) : NAME(splat)(0));
        if (l->onto)
            y += NAME(load)(l->onto, at + i, l->wide);
        if (l->wide || l->wide_out)
            *(vec_at *)((float *)l->y + at + i) = y;
        else
            NAME(store_rounded)((uint16_t *)l->y + at + i, y);
    }
}

/* The same for some columns of a panel. */
INLINE void NAME(finish_columns)(const struct linear *l, const float *c, int64_t at, int64_t column, int columns) {
    for (int i = 0; i < columns; i++, at++) {
        float y = c[i] + (l->bias ? l->bias[column + i] : 0);
        if (l->onto)
            y += l->wide ? ((const float *)l->onto)[at] : widen(((const uint16_t *)l->onto)[at]);
        if (l->wide || l->wide_out)
            ((float *)l->y)[at] = y;
        else
            ((uint16_t *)l->y)[at] = narrow(y);
    }
}

/* Add bias and residual, and store in y. */
NOINLINE static void NAME(epilogue)(const struct linear *l, const float *c, int64_t first, int rows, int64_t column,
                                    int columns) {
    for (int r = 0; r < rows; r++, c += 2 * BLOCK)
        for (int i = 0; i < columns; i += BLOCK) {
            int64_t at = (first + r) * l->stride + column + i;
            if (columns - i < BLOCK)
                NAME(finish_columns)(l, c + i, at, column + i, columns - i);
            else
                NAME(finish_panel)(l, c + i, at, column + i);
        }
}

struct NAME(linear_job) {
    const struct linear *l;
    const char *x; /* rows as the tiles read them */
    int64_t row_bytes, pairs; /* pairs of panels */
    float *widened;
    struct NAME(digits) *digits; /* in place of x: of rows that are multiplied with codes */
};

TARGET static int NAME(widen_rows)(const void *context, int64_t first, int64_t last) {
    const struct NAME(linear_job) *j = context;
    for (int64_t i = first * j->l->inputs; i < last * j->l->inputs; i++)
        j->widened[i] = widen(((const uint16_t *)j->l->x)[i]);
    return 0;
}

TARGET static int NAME(split_rows)(const void *context, int64_t first, int64_t last) {
    const struct NAME(linear_job) *j = context;
    const int64_t groups = j->l->inputs / GROUP_INPUTS;
    const int kind = NAME(kind_of)(j->l->format), base = NAME(level_base)(j->l->format);
    for (int64_t g = first * groups; g < last * groups; g++)
        NAME(split_group)((const uint16_t *)j->l->x + g * GROUP_INPUTS, kind, base, j->digits + g);
    return 0;
}

/* Multiply groups of rows with pairs of panels, the pairs of one group after the other. */
TARGET static int NAME(multiply_groups)(const void *context, int64_t first_part, int64_t last_part) {
    const struct NAME(linear_job) *j = context;
    const struct linear *l = j->l;
    struct NAME(linear_work) *w = scratch(&own_memory, sizeof *w);
    for (int64_t part = first_part; w && part < last_part; part++) {
        int64_t first = part / j->pairs * NAME(GROUP), column = part % j->pairs * 2 * BLOCK;
        int rows = l->rows - first < NAME(GROUP) ? (int)(l->rows - first) : NAME(GROUP);
        int columns = l->outputs - column < 2 * BLOCK ? (int)(l->outputs - column) : 2 * BLOCK;
        const char *x = j->x + first * j->row_bytes;
        const int64_t panel = column / BLOCK, panels = columns > BLOCK ? 2 : 1;
        if (!l->format)
            NAME(product)(l, w, x, rows, panel, panels);
        for (int p = 0; p < panels && l->format; p++)
            if (j->digits)
                NAME(multiply_codes)(l, rows, j->digits + first * (l->inputs / GROUP_INPUTS), panel + p,
                                     w->c + p * BLOCK, 2 * BLOCK);
            else
                NAME(multiply_float8)(l, rows, x, panel + p, w->c + p * BLOCK, 2 * BLOCK);
        NAME(epilogue)(l, w->c, first, rows, column, columns);
    }
    return !w;
}

TARGET static int NAME(linear)(const void *call) {
    const struct linear *l = call;
    struct NAME(linear_job) j = {.l = l, .x = l->x};
    const int is_split = l->format && l->format->bits != FLOAT8, is_widened = !is_split && !DOTS && !l->wide;
    const int64_t size = is_split ? l->inputs / GROUP_INPUTS * sizeof *j.digits : is_widened ? 4 * l->inputs : 0;
    void *memory = size ? scratch(&shared_memory, l->rows * size) : NULL;
    if (size && l->rows && !memory)
        return 1;
    j.row_bytes = l->inputs * (DOTS && !l->wide ? 2 : 4);
    j.pairs = (l->outputs + 2 * BLOCK - 1) / (2 * BLOCK);
    if (is_split) {
        j.digits = memory;
        run_rows(NAME(split_rows), &j, l->rows);
    } else if (is_widened) {
        j.widened = memory;
        run_rows(NAME(widen_rows), &j, l->rows);
        j.x = memory;
    }
    int64_t groups = (l->rows + NAME(GROUP) - 1) / NAME(GROUP);
    return pool_run(NAME(multiply_groups), &j, groups * j.pairs);
}

/* x / rms(x) * weight (RMSNorm, arXiv 1910.07467). */
NOINLINE static void NAME(norm_row)(const struct norm *n, int64_t row) {
    int64_t item = n->wide ? 4 : 2;
    const char *x = (const char *)n->x + (row / n->heads * n->stride + row % n->heads * n->width) * item;
    char *y = (char *)n->y + row * n->width * item;
    vec squares = NAME(splat)(0);
    for (int64_t i = 0; i < n->width; i += LANES) {
        vec v = NAME(load)(x, i, n->wide);
        squares += v * v;
    }
    float sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += squares[i];
    float factor = 1 / sqrtf(sum / n->width + n->epsilon);
    for (int64_t i = 0; i < n->width; i += LANES)
        NAME(store)(y, i, NAME(load)(x, i, n->wide) * factor * NAME(load)(n->weight, i, n->wide), n->wide);
}

/* g * sigmoid(g) */
INLINE vec NAME(silu)(vec g) {
    ints negative = g < 0;
    vec e = NAME(exp2)((vec)((ints)g | (int32_t)0x80000000) * 1.44269504f); /* e^-|g| */
    vec top = (vec)(((ints)e & negative) | ((ints)NAME(splat)(1) & ~negative));
    return g * top / (1 + e);
}

/* silu(gate) * up, of rows [gate, up]. */
NOINLINE static void NAME(gate_row)(const struct norm *n, int64_t row) {
    int64_t item = n->wide ? 4 : 2;
    const char *x = (const char *)n->x + 2 * row * n->width * item;
    char *y = (char *)n->y + row * n->width * item;
    for (int64_t i = 0; i < n->width; i += LANES) {
        vec g = NAME(load)(x, i, n->wide), up = NAME(load)(x, n->width + i, n->wide);
        NAME(store)(y, i, NAME(silu)(g) * up, n->wide);
    }
}

TARGET static int NAME(norm_rows)(const void *call, int64_t first, int64_t last) {
    const struct norm *n = call;
    for (int64_t row = first; row < last; row++)
        if (n->weight)
            NAME(norm_row)(n, row);
        else
            NAME(gate_row)(n, row);
    return 0;
}

TARGET static int NAME(norm)(const void *call) { return run_rows(NAME(norm_rows), call, ((const struct norm *)call)->rows); }
