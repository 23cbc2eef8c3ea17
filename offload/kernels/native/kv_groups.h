/* The layout and the arithmetic of quantised keys and values (types.h), for all levels; quantize_kv.h makes them. */

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

/* Where the code of the key of token `t` in dimension `d` is, and that of the value: bytes from the first line on. */
static inline int key_place(int dim, int t, int d) { return (t / BLOCK * (dim / 4) + d / 4) * 64 + t % BLOCK * 4 + d % 4; }

static inline int value_place(int t, int d) {
    return (d / BLOCK * 8 + t % BLOCK / 2) * 64 + d % BLOCK * 4 + t % 2 * 2 + t / BLOCK;
}

UNFUSED
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

static int dequantize_groups(const void *call, int64_t first, int64_t last) {
    const struct quantize *j = call;
    for (int64_t i = first; i < last; i++)
        dequantize_group(j, j->groups + 3 * i, i);
    return 0;
}

/* The grids of all channels of a group's keys, or of all tokens of its values: of numbers that share a scale. */
struct grids {
    float least[MAX_HEAD_DIM], most[MAX_HEAD_DIM];     /* the limits of the numbers, from which the rest follows */
    int32_t is_odd[MAX_HEAD_DIM];                      /* not 0: a number is not finite; scale and middle become NaN */
    float middle[MAX_HEAD_DIM], inverse[MAX_HEAD_DIM]; /* both 0 where all codes are 0 */
};

/*
 * Choose `count` grids from their limits, as bf16, and store their scales and middles. For all levels: an instruction that
 * multiplies and adds at once would round otherwise.
 */
static __attribute__((noinline)) void fit_grids(struct grids *g, int count, uint16_t *numbers) {
    const float below = 128, above = 127, share = below / (below + above); /* levels on both sides of the middle */
    for (int i = 0; i < count; i++) {
        const float least = g->least[i], most = g->most[i];
        const float middle = widen(narrow(least + (most * share - least * share)));
        const float up = (most - middle) / above, down = (middle - least) / below;
        const float scale = widen(narrow_up(up > down ? up : down));
        const int has_codes = !g->is_odd[i] && scale >= 0x1p-126f; /* else they are equal, too close, or not finite */
        g->inverse[i] = has_codes ? 1 / scale : 0, g->middle[i] = g->inverse[i] > 0 ? middle : 0;
        numbers[i] = narrow(g->is_odd[i] ? NAN : scale), numbers[count + i] = narrow(g->is_odd[i] ? NAN : middle);
    }
}
END_UNFUSED
