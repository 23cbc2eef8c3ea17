/*
 * Quantising keys and values, and back; see types.h. One version for all levels. What these quantise with vectors, in
 * the same bits, is in quantize_kv.h.
 */

static inline int64_t group_header(int dim) { return 4 * dim + 4 * SPAN; }

static inline int64_t kv_group_bytes(const struct format *f, int dim) {
    if (is_packed(f))
        return run_bytes(dim) - (f->bits == PLANE ? RUN * dim : 0);
    return group_header(dim) + 64 * dim;
}

/* Blocks of a group, or of a packed run. */
static inline int kv_group_blocks(const struct format *f) { return (is_packed(f) ? RUN : SPAN) / BLOCK; }

static inline const char *key_codes(const char *group, int dim) { return group + group_header(dim); }

static inline const char *value_codes(const char *group, int dim) { return key_codes(group, dim) + 32 * dim; }

/* A positive number as the bf16 above it, or its own. */
static inline uint16_t narrow_up(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits >> 16) + ((bits & 0xffff) != 0));
}

UNFUSED
struct grid { /* of numbers that share a scale */
    float scale, middle, inverse;
};

/* With the inverse of the scale; without it, all codes are 0: the numbers are equal, too close, or not finite. */
static inline struct grid make_grid(float scale, float middle) {
    return (struct grid){scale, middle, scale >= 0x1p-126f ? 1 / scale : 0};
}

/* Choose the scale and the middle of finite numbers from their limits, as bf16. */
static inline struct grid span_grid(float least, float most) {
    const float below = 128, above = 127; /* levels on both sides of the middle */
    float share = below / (below + above);
    float middle = widen(narrow(least + (most * share - least * share)));
    float up = (most - middle) / above, down = (middle - least) / below;
    return make_grid(widen(narrow_up(up > down ? up : down)), middle);
}

/* Choose those of `count` numbers, `stride` apart; NaN if one of them is not finite. */
static inline struct grid fit_grid(const float *x, int count, int stride) {
    float least = x[0], most = x[0], width = 0;
    for (int i = 0; i < count; i++) {
        least = x[i * stride] < least ? x[i * stride] : least;
        most = x[i * stride] > most ? x[i * stride] : most;
        width += x[i * stride] - x[i * stride]; /* NaN stays */
    }
    return width != 0 ? (struct grid){NAN, NAN, 0} : span_grid(least, most);
}

/* Round to the nearest integer, ties to even; |x| is below 2^22. The library's function is a call on old processors. */
static inline float round_even(float x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23 */
    return (x + magic) - magic;
}

/* Return the code of a number, with a sign. */
static inline int grid_code(struct grid grid, float x) {
    if (!(grid.inverse > 0))
        return 0;
    float steps = (x - grid.middle) * grid.inverse;
    return (int)round_even(steps > 127 ? 127 : steps < -128 ? -128 : steps);
}

/* Where the code of the key of token `t` in dimension `d` is, and that of the value: bytes from the first line on. */
static inline int key_place(int dim, int t, int d) { return (t / BLOCK * (dim / 4) + d / 4) * 64 + t % BLOCK * 4 + d % 4; }

static inline int value_place(int t, int d) {
    return (d / BLOCK * 8 + t % BLOCK / 2) * 64 + d % BLOCK * 4 + t % 2 * 2 + t / BLOCK;
}

/* Quantise a group number by number. */
static void quantize_by_number(const struct quantize *j, const int32_t *item) {
    int dim = j->head_dim, wide = j->wide;
    int64_t half = (int64_t)BLOCK * dim * (wide ? 4 : 2);
    const char *blocks = j->kv + item[0] * j->head_stride + item[1] * 2 * half;
    char *group = j->quantized + item[0] * j->quantized_stride + item[2] * kv_group_bytes(j->format, dim);
    uint16_t *numbers = (uint16_t *)group, *value_numbers = numbers + 2 * dim;
    char *key_lines = (char *)key_codes(group, dim), *value_lines = (char *)value_codes(group, dim);
    float keys[SPAN * MAX_HEAD_DIM], values[SPAN * MAX_HEAD_DIM];
    for (int t = 0; t < SPAN; t++) {
        const char *block = blocks + t / BLOCK * 2 * half;
        for (int d = 0; d < dim; d++) {
            keys[t * dim + d] = read_element(block, key_index(t % BLOCK, d, wide), wide);
            values[t * dim + d] = read_element(block + half, value_index(t % BLOCK, d, dim, wide), wide);
        }
    }
    for (int d = 0; d < dim; d++) {
        struct grid grid = fit_grid(keys + d, SPAN, dim);
        numbers[d] = narrow(grid.scale), numbers[dim + d] = narrow(grid.middle);
        for (int t = 0; t < SPAN; t++)
            key_lines[key_place(dim, t, d)] = (char)grid_code(grid, keys[t * dim + d]);
    }
    for (int t = 0; t < SPAN; t++) {
        struct grid grid = fit_grid(values + t * dim, dim, 1);
        value_numbers[t] = narrow(grid.scale), value_numbers[SPAN + t] = narrow(grid.middle);
        for (int d = 0; d < dim; d++)
            value_lines[value_place(t, d)] = (char)grid_code(grid, values[t * dim + d]);
    }
}

static void dequantize_group(const struct quantize *j, const int32_t *item, int64_t to) {
    int dim = j->head_dim;
    const char *group = j->quantized + item[0] * j->quantized_stride + item[2] * kv_group_bytes(j->format, dim);
    const char *key_lines = key_codes(group, dim), *value_lines = value_codes(group, dim);
    const uint16_t *numbers = (const uint16_t *)group, *value_numbers = numbers + 2 * dim;
    for (int t = 0; t < SPAN; t++)
        for (int d = 0; d < dim; d++) {
            float key = (int8_t)key_lines[key_place(dim, t, d)], value = (int8_t)value_lines[value_place(t, d)];
            int64_t at = (to * SPAN + t) * dim + d;
            write_element(j->keys, at, key * widen(numbers[d]) + widen(numbers[dim + d]), j->wide);
            write_element(j->values, at, value * widen(value_numbers[t]) + widen(value_numbers[SPAN + t]), j->wide);
        }
}

static int quantize_groups(const void *call, int64_t first, int64_t last) {
    const struct quantize *j = call;
    for (int64_t i = first; i < last; i++)
        if (j->keys)
            dequantize_group(j, j->groups + 3 * i, i);
        else
            quantize_by_number(j, j->groups + 3 * i);
    return 0;
}

/* The grids of all channels of a group's keys, or of all tokens of its values. */
struct grids {
    float least[MAX_HEAD_DIM], most[MAX_HEAD_DIM];      /* the limits of the numbers, from which the rest follows */
    float middle[MAX_HEAD_DIM], inverse[MAX_HEAD_DIM];  /* both 0 where all codes are 0 */
};

/*
 * Choose `count` grids from their limits, and store their scales and middles. For all levels: an instruction that
 * multiplies and adds at once would round otherwise.
 */
static __attribute__((noinline)) void fit_grids(struct grids *g, int count, uint16_t *numbers) {
    for (int i = 0; i < count; i++) {
        struct grid grid = span_grid(g->least[i], g->most[i]);
        numbers[i] = narrow(grid.scale), numbers[count + i] = narrow(grid.middle);
        g->inverse[i] = grid.inverse, g->middle[i] = grid.inverse > 0 ? grid.middle : 0;
    }
}
END_UNFUSED
