/* Packing and dequantising quantised weights. One version for all levels, because it is not on a hot path. */

static inline __attribute__((always_inline)) int code_bytes(int bits) { /* of a group */
    return bits >= 8 ? 512 : bits == 6 ? 384 : bits == 5 ? 320 : 256;
}

static inline int block_groups(const struct format *f) { return f->nested ? NESTED_GROUPS : f->wide ? f->wide : 1; }

static inline int header_bytes(const struct format *f) { /* of what a block begins with */
    return (f->nested ? 2 : f->wide ? 4 : 0) * BLOCK * (1 + f->has_minimum);
}

static inline int scale_bytes(const struct format *f) { /* of a group's scales, or of its minima */
    return f->wide ? 0 : f->nested ? BLOCK : 2 * BLOCK;
}

static inline int64_t group_bytes(const struct format *f) {
    return code_bytes(f->bits) + scale_bytes(f) * ((f->bits == 6 ? 2 : 1) + f->has_minimum);
}

static inline int64_t block_bytes(const struct format *f) { return header_bytes(f) + block_groups(f) * group_bytes(f); }

static inline uint32_t four_bytes(const void *memory) {
    uint32_t word;
    memcpy(&word, memory, 4);
    return word;
}

/* Store a group's codes of one output in a panel's lane. */
static void pack_group(int bits, const uint8_t *codes, char *to, int lane) {
    uint32_t high[2] = {0, 0};
    for (int i = 0; i < 8; i++) {
        uint32_t four = four_bytes(codes + 4 * i), low = four & 0x0f0f0f0f;
        if (bits == FLOAT8)
            four = (four & 0xff0000ff) | (four & 0xff00) << 8 | (four >> 8 & 0xff00);
        if (bits >= 8)
            memcpy(to + 64 * i + 4 * lane, &four, 4);
        else if (i % 2) {
            low = low << 4 | four_bytes(to + 64 * (i / 2) + 4 * lane);
            memcpy(to + 64 * (i / 2) + 4 * lane, &low, 4);
        } else {
            memcpy(to + 64 * (i / 2) + 4 * lane, &low, 4);
        }
        if (bits == 5)
            high[0] |= (four >> 4 & 0x01010101) << i;
        if (bits == 6)
            high[i / 4] |= (four >> 4 & 0x03030303) << 2 * (i % 4);
    }
    for (int part = 0; part < bits - 4 && bits < 8; part++)
        memcpy(to + 256 + 64 * part + 4 * lane, high + part, 4);
}

/* Pack the codes of some outputs. Memory between them, for the scales, is left as it is. */
static int pack_rows(const void *call, int64_t first, int64_t last) {
    const struct pack *p = call;
    const struct format *f = p->format;
    int64_t groups = block_groups(f), blocks = p->inputs / (groups * GROUP_INPUTS);
    for (int64_t row = first; row < last; row++)
        for (int64_t g = 0; g < p->inputs / GROUP_INPUTS; g++) {
            char *block = p->weight + (row / BLOCK * blocks + g / groups) * block_bytes(f);
            char *group = block + header_bytes(f) + g % groups * group_bytes(f);
            const uint8_t *codes = p->codes + row * p->row_stride + g * p->group_stride;
            uint8_t separate[GROUP_INPUTS];
            for (int i = 0; p->halves && i < GROUP_INPUTS / 2; i++) {
                separate[i] = codes[i] & 15;
                separate[GROUP_INPUTS / 2 + i] = codes[i] >> 4;
            }
            pack_group(f->bits, p->halves ? separate : codes, group, row % BLOCK);
        }
    return 0;
}

static float half_at(const char *memory, int i) { /* finite */
    uint16_t half;
    memcpy(&half, memory + 2 * i, 2);
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    float size;
    memcpy(&size, &bits, 4);
    size *= 0x1p112f;
    return half & 0x8000 ? -size : size;
}

static float float8(uint8_t code) { /* e4m3; not NaN */
    uint32_t bits = (uint32_t)(code & 0x7f) << 20;
    float size;
    memcpy(&size, &bits, 4);
    size *= 0x1p120f; /* the exponent's bias: 127 - 7; exact */
    return code & 0x80 ? -size : size;
}

/* Return number `lane` of the scales, or of the minima, that follow a group's codes; of nested ones with their factor. */
static float number_at(const struct format *f, const char *numbers, const char *factors, int lane) {
    if (f->nested)
        return half_at(factors, lane) * (float)((const int8_t *)numbers)[lane];
    return half_at(numbers, lane);
}

static float float_at(const char *memory, int i) {
    float number;
    memcpy(&number, memory + 4 * i, 4);
    return number;
}

/* Return the level of input `i` of a group, for the output of a panel's lane. */
static float level_at(const struct format *f, const char *codes, int i, int lane) {
    const uint8_t *at = (const uint8_t *)codes + 4 * lane;
    const int member = i % 4, four = i / 4;
    if (f->bits == FLOAT8)
        return float8(at[64 * four + (member % 2 * 2 + member / 2)]);
    if (f->bits == 8)
        return (float)(int8_t)at[64 * four + member];
    int code = at[64 * (four / 2) + member] >> 4 * (four % 2) & 15;
    if (f->bits == 5)
        code |= (at[256 + member] >> four & 1) << 4;
    if (f->bits == 6)
        code |= (at[256 + 64 * (four / 4) + member] >> 2 * (four % 4) & 3) << 4;
    return widen(f->levels[code]);
}

UNFUSED
/* Dequantise one block for a panel's lane. */
static void unpack_block(const struct format *f, const char *b, int lane, float *to) {
    const char *outer = b;
    int64_t codes = code_bytes(f->bits);
    int halves = f->bits == 6 ? 2 : 1;
    b += header_bytes(f);
    for (int g = 0; g < block_groups(f); g++, to += GROUP_INPUTS, b += group_bytes(f)) {
        const char *scales = b + codes, *minima = scales + halves * scale_bytes(f);
        float least = 0;
        if (f->has_minimum)
            least = f->wide ? float_at(outer + 4 * BLOCK, lane) : number_at(f, minima, outer + 2 * BLOCK, lane);
        for (int i = 0; i < GROUP_INPUTS; i++) {
            const char *own = scales + i * halves / GROUP_INPUTS * scale_bytes(f);
            float scale = f->wide ? float_at(outer, lane) : number_at(f, own, outer, lane);
            to[i] = scale * level_at(f, b, i, lane) + least;
        }
    }
}

static int unpack_rows(const void *call, int64_t first, int64_t last) {
    const struct unpack *u = call;
    int inputs = block_groups(u->format) * GROUP_INPUTS;
    int64_t bytes = block_bytes(u->format), blocks = u->inputs / inputs;
    float values[NESTED_GROUPS * GROUP_INPUTS];
    for (int64_t row = first; row < last; row++)
        for (int64_t block = 0; block < blocks; block++) {
            unpack_block(u->format, u->weight + (u->ids[row] / BLOCK * blocks + block) * bytes, u->ids[row] % BLOCK,
                         values);
            for (int i = 0; i < inputs; i++)
                write_element(u->y, row * u->inputs + block * inputs + i, values[i], u->wide);
        }
    return 0;
}
END_UNFUSED

static int pack(const void *call) { return run_rows(pack_rows, call, ((const struct pack *)call)->rows); }

static int unpack(const void *call) { return run_rows(unpack_rows, call, ((const struct unpack *)call)->rows); }
