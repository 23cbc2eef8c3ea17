/* Quantising keys and values, and back; see types.h. One version for all levels, because little is computed here. */

static inline int64_t quad_bytes(const struct format *f) { return f->bits == 4 ? 64 : 128; }

static inline int64_t group_header(int dim) { return 4 * dim + 4 * SPAN; }

/* Bytes of one block's codes of keys, or of values. */
static inline int64_t block_codes(const struct format *f, int dim) { return dim / 8 * quad_bytes(f); }

static inline int64_t kv_group_bytes(const struct format *f, int dim) { return group_header(dim) + 4 * block_codes(f, dim); }

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

struct grid { /* of numbers that share a scale */
    float scale, middle;
};

/* Choose the scale and the middle of `count` numbers, `stride` apart, as bf16; NaN if one of them is not finite. */
static struct grid fit_grid(const struct format *f, const float *x, int count, int stride) {
    float least = x[0], most = x[0], width = 0;
    for (int i = 0; i < count; i++) {
        least = x[i * stride] < least ? x[i * stride] : least;
        most = x[i * stride] > most ? x[i * stride] : most;
        width += x[i * stride] - x[i * stride]; /* NaN stays */
    }
    struct grid grid = {NAN, NAN};
    if (width != 0)
        return grid;
    float below = f->bits == 4 ? 8 : 128, above = below - 1; /* levels on both sides of the middle */
    if (f->bits == FLOAT8) { /* a power of two: multiplying by it rounds nothing */
        float size = most > -least ? most : -least, scale = 0x1p-126f;
        while (scale * 448 < size)
            scale *= 2;
        return (struct grid){size > 0 ? scale : 0, 0};
    }
    float share = below / (below + above);
    grid.middle = widen(narrow(least + (most * share - least * share)));
    float up = (most - grid.middle) / above, down = (grid.middle - least) / below;
    grid.scale = widen(narrow_up(up > down ? up : down));
    return grid;
}

/* Return the code of a number, with a sign. */
static inline int grid_code(const struct format *f, struct grid grid, float x) {
    if (!(grid.scale > 0))
        return 0;
    float steps = (x - grid.middle) / grid.scale;
    if (f->bits == FLOAT8)
        return to_float8(steps);
    float most = f->bits == 4 ? 7 : 127;
    return (int)rintf(steps > most ? most : steps < -most - 1 ? -most - 1 : steps);
}

/* Add a code to a quad, which is zero at first. */
static inline void put_code(const struct format *f, char *quad, int pair, int column, int member, int code) {
    if (f->bits == 4)
        ((uint16_t *)quad)[2 * column + member] |= (uint16_t)(((code + 8) & 15) << 4 * pair);
    else
        ((uint8_t *)quad)[32 * pair + 2 * column + member] = (uint8_t)code;
}

static inline float get_level(const struct format *f, const char *quad, int pair, int column, int member) {
    if (f->bits == 4)
        return (float)(((const uint16_t *)quad)[2 * column + member] >> 4 * pair & 15) - 8;
    uint8_t code = ((const uint8_t *)quad)[32 * pair + 2 * column + member];
    return f->bits == FLOAT8 ? from_float8(code) : (int8_t)code;
}

/* The quad, and in it the pair, of a key or a value. */
static inline char *key_quad(const struct format *f, char *group, int dim, int t, int d) {
    return group + group_header(dim) + t / BLOCK * block_codes(f, dim) + d / 8 * quad_bytes(f);
}

static inline char *value_quad(const struct format *f, char *group, int dim, int t, int d) {
    char *codes = group + group_header(dim) + 2 * block_codes(f, dim) + t / BLOCK * block_codes(f, dim);
    return codes + (d / BLOCK * 2 + t % BLOCK / 8) * quad_bytes(f);
}

static void quantize_group(const struct quantize *j, const int32_t *item) {
    const struct format *f = j->format;
    int dim = j->head_dim, wide = j->wide;
    int64_t half = (int64_t)BLOCK * dim * (wide ? 4 : 2);
    const char *blocks = j->kv + item[0] * j->head_stride + item[1] * 2 * half;
    char *group = j->quantized + item[0] * j->quantized_stride + item[2] * kv_group_bytes(f, dim);
    uint16_t *numbers = (uint16_t *)group, *value_numbers = numbers + 2 * dim;
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
            put_code(f, key_quad(f, group, dim, t, d), d % 8 / 2, t % BLOCK, d % 2, grid_code(f, grid, keys[t * dim + d]));
    }
    for (int t = 0; t < SPAN; t++) {
        struct grid grid = fit_grid(f, values + t * dim, dim, 1);
        value_numbers[t] = narrow(grid.scale), value_numbers[SPAN + t] = narrow(grid.middle);
        for (int d = 0; d < dim; d++)
            put_code(f, value_quad(f, group, dim, t, d), t % 8 / 2, d % BLOCK, t % 2,
                     grid_code(f, grid, values[t * dim + d]));
    }
}

static void dequantize_group(const struct quantize *j, const int32_t *item, int64_t to) {
    const struct format *f = j->format;
    int dim = j->head_dim;
    char *group = j->quantized + item[0] * j->quantized_stride + item[2] * kv_group_bytes(f, dim);
    const uint16_t *numbers = (const uint16_t *)group, *value_numbers = numbers + 2 * dim;
    for (int t = 0; t < SPAN; t++)
        for (int d = 0; d < dim; d++) {
            float key = get_level(f, key_quad(f, group, dim, t, d), d % 8 / 2, t % BLOCK, d % 2);
            float value = get_level(f, value_quad(f, group, dim, t, d), t % 8 / 2, d % BLOCK, t % 2);
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
            quantize_group(j, j->groups + 3 * i);
    return 0;
}
