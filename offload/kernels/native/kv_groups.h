/*
 * Quantising keys and values, and back; see types.h. One version for all levels. What these quantise with vectors, in
 * the same bits, is in quantize_kv.h.
 */

static inline int64_t group_header(int dim) { return 4 * dim + 4 * SPAN; }

/* Bytes of a number of lines. */
static inline int64_t line_bytes(const struct format *f, int64_t lines) { return f->bits == 4 ? 32 * lines : 64 * lines; }

static inline int64_t kv_group_bytes(const struct format *f, int dim) {
    if (is_packed(f))
        return run_bytes(dim) - (f->bits == PLANE_ALONE ? RUN * dim : 0);
    return group_header(dim) + line_bytes(f, dim);
}

/* Blocks of a group, or of a packed run. */
static inline int kv_group_blocks(const struct format *f) { return (is_packed(f) ? RUN : SPAN) / BLOCK; }

static inline const char *key_codes(const char *group, int dim) { return group + group_header(dim); }

static inline const char *value_codes(const struct format *f, const char *group, int dim) {
    return key_codes(group, dim) + line_bytes(f, dim / 2);
}

/* A positive number as the bf16 above it, or its own. */
static inline uint16_t narrow_up(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits >> 16) + ((bits & 0xffff) != 0));
}

/* Round to e4m3, to nearest, ties to even; |x| is at most 448. */
static inline uint8_t to_float8(float x) {
    float size = fabsf(x), step = 0x1p-9f; /* of the subnormal numbers */
    int exponent = 1;
    for (; exponent < 15 && size >= ldexpf(1, exponent - 6); exponent++)
        step = ldexpf(1, exponent - 9);
    int units = (int)rintf(size / step), code = units;
    if (size >= 0x1p-6f)
        code = units == 16 ? (exponent + 1) << 3 : exponent << 3 | (units - 8);
    return (uint8_t)((code > 0x7e ? 0x7e : code) | (x < 0 ? 0x80 : 0));
}

static inline float from_float8(uint8_t code) {
    int exponent = code >> 3 & 15, units = code & 7;
    float size = exponent ? ldexpf(8 + units, exponent - 10) : ldexpf(units, -9);
    return code & 0x80 ? -size : size;
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
static inline __attribute__((always_inline)) struct grid span_grid(const struct format *f, float least, float most) {
    float below = f->bits == 4 ? 8 : 128, above = below - 1; /* levels on both sides of the middle */
    if (f->bits == FLOAT8) { /* a power of two: multiplying by it rounds nothing */
        float size = most > -least ? most : -least, scale = 0x1p-126f;
        while (scale * 448 < size)
            scale *= 2;
        return make_grid(size > 0 ? scale : 0, 0);
    }
    float share = below / (below + above);
    float middle = widen(narrow(least + (most * share - least * share)));
    float up = (most - middle) / above, down = (middle - least) / below;
    return make_grid(widen(narrow_up(up > down ? up : down)), middle);
}

/* Choose those of `count` numbers, `stride` apart; NaN if one of them is not finite. */
static inline __attribute__((always_inline)) struct grid fit_grid(const struct format *f, const float *x, int count, int stride) {
    float least = x[0], most = x[0], width = 0;
    for (int i = 0; i < count; i++) {
        least = x[i * stride] < least ? x[i * stride] : least;
        most = x[i * stride] > most ? x[i * stride] : most;
        width += x[i * stride] - x[i * stride]; /* NaN stays */
    }
    return width != 0 ? (struct grid){NAN, NAN, 0} : span_grid(f, least, most);
}

/* Round to the nearest integer, ties to even; |x| is below 2^22. The library's function is a call on old processors. */
static inline float round_even(float x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23 */
    return (x + magic) - magic;
}

/* Return the code of a number, with a sign. */
static inline __attribute__((always_inline)) int grid_code(const struct format *f, struct grid grid, float x) {
    if (!(grid.inverse > 0))
        return 0;
    float steps = (x - grid.middle) * grid.inverse;
    if (f->bits == FLOAT8)
        return to_float8(steps);
    float most = f->bits == 4 ? 7 : 127;
    return (int)round_even(steps > most ? most : steps < -most - 1 ? -most - 1 : steps);
}

/* Where a code is: its line, and its byte there. */
struct place {
    int line, byte;
};

/* Of the key of token `t` in dimension `d`. */
static inline struct place key_place(int dim, int t, int d) {
    return (struct place){t / BLOCK * (dim / 4) + d / 4, t % BLOCK * 4 + d % 4};
}

/* Of the value, counted from the first line of values. */
static inline struct place value_place(int t, int d) {
    return (struct place){d / BLOCK * 8 + t % BLOCK / 2, d % BLOCK * 4 + t % 2 * 2 + t / BLOCK};
}

/* Store a code in lines that are zero at first. */
static inline void put_code(const struct format *f, char *lines, struct place at, int code) {
    if (f->bits == 4)
        lines[at.line / 2 * 64 + at.byte] |= (char)((code & 15) << at.line % 2 * 4);
    else
        lines[at.line * 64 + at.byte] = (char)code;
}

static inline float get_level(const struct format *f, const char *lines, struct place at) {
    if (f->bits == 4) {
        int digit = lines[at.line / 2 * 64 + at.byte] >> at.line % 2 * 4 & 15;
        return (float)((digit ^ 8) - 8);
    }
    uint8_t code = (uint8_t)lines[at.line * 64 + at.byte];
    return f->bits == FLOAT8 ? from_float8(code) : (int8_t)code;
}

/* Quantise a group to one format, a constant where this is inlined. */
static inline __attribute__((always_inline)) void quantize_group(const struct quantize *j, const struct format *f,
                                                                 const int32_t *item) {
    int dim = j->head_dim, wide = j->wide;
    int64_t half = (int64_t)BLOCK * dim * (wide ? 4 : 2);
    const char *blocks = j->kv + item[0] * j->head_stride + item[1] * 2 * half;
    char *group = j->quantized + item[0] * j->quantized_stride + item[2] * kv_group_bytes(f, dim);
    uint16_t *numbers = (uint16_t *)group, *value_numbers = numbers + 2 * dim;
    char *key_lines = (char *)key_codes(group, dim), *value_lines = (char *)value_codes(f, group, dim);
    float keys[SPAN * MAX_HEAD_DIM], values[SPAN * MAX_HEAD_DIM];
    memset(group, 0, kv_group_bytes(f, dim));
    for (int t = 0; t < SPAN; t++) {
        const char *block = blocks + t / BLOCK * 2 * half;
        for (int d = 0; d < dim; d++) {
            keys[t * dim + d] = read_element(block, key_index(t % BLOCK, d, wide), wide);
            values[t * dim + d] = read_element(block + half, value_index(t % BLOCK, d, dim, wide), wide);
        }
    }
    for (int d = 0; d < dim; d++) {
        struct grid grid = fit_grid(f, keys + d, SPAN, dim);
        numbers[d] = narrow(grid.scale), numbers[dim + d] = narrow(grid.middle);
        for (int t = 0; t < SPAN; t++)
            put_code(f, key_lines, key_place(dim, t, d), grid_code(f, grid, keys[t * dim + d]));
    }
    for (int t = 0; t < SPAN; t++) {
        struct grid grid = fit_grid(f, values + t * dim, dim, 1);
        value_numbers[t] = narrow(grid.scale), value_numbers[SPAN + t] = narrow(grid.middle);
        for (int d = 0; d < dim; d++)
            put_code(f, value_lines, value_place(t, d), grid_code(f, grid, values[t * dim + d]));
    }
}

static void dequantize_group(const struct quantize *j, const int32_t *item, int64_t to) {
    const struct format *f = j->format;
    int dim = j->head_dim;
    const char *group = j->quantized + item[0] * j->quantized_stride + item[2] * kv_group_bytes(f, dim);
    const char *key_lines = key_codes(group, dim), *value_lines = value_codes(f, group, dim);
    const uint16_t *numbers = (const uint16_t *)group, *value_numbers = numbers + 2 * dim;
    for (int t = 0; t < SPAN; t++)
        for (int d = 0; d < dim; d++) {
            float key = get_level(f, key_lines, key_place(dim, t, d));
            float value = get_level(f, value_lines, value_place(t, d));
            int64_t at = (to * SPAN + t) * dim + d;
            write_element(j->keys, at, key * widen(numbers[d]) + widen(numbers[dim + d]), j->wide);
            write_element(j->values, at, value * widen(value_numbers[t]) + widen(value_numbers[SPAN + t]), j->wide);
        }
}

/* Quantise a group number by number. */
static void quantize_by_number(const struct quantize *j, const int32_t *item) {
    if (j->format->bits == 4)
        quantize_group(j, &(const struct format){.bits = 4}, item);
    else if (j->format->bits == 8)
        quantize_group(j, &(const struct format){.bits = 8}, item);
    else
        quantize_group(j, &(const struct format){.bits = FLOAT8}, item);
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
static __attribute__((noinline)) void fit_grids(int bits, struct grids *g, int count, uint16_t *numbers) {
    const struct format f = {.bits = bits};
    for (int i = 0; i < count; i++) {
        struct grid grid = span_grid(&f, g->least[i], g->most[i]);
        numbers[i] = narrow(grid.scale), numbers[count + i] = narrow(grid.middle);
        g->inverse[i] = grid.inverse, g->middle[i] = grid.inverse > 0 ? grid.middle : 0;
    }
}
END_UNFUSED
