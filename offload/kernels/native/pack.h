/* Packing and dequantising quantised weights. One version for all levels, because it is not on a hot path. */

#define ALWAYS inline __attribute__((always_inline))

static ALWAYS int code_bytes(int bits) { /* of a group */
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

/* Store a group's codes of one output in a panel's lane; the order is that of types.h. */
static ALWAYS void pack_group(const int bits, const uint8_t codes[GROUP_INPUTS], char *to, int lane) {
    uint32_t high[2] = {0, 0};
    to += 4 * lane;
    for (int i = 0; i < GROUP_INPUTS / 8; i++) {
        uint64_t eight;
        memcpy(&eight, codes + 8 * i, 8);
        if (bits == FLOAT8) {
            const uint64_t inner = (eight & 0x0000ff000000ff00) << 8 | (eight >> 8 & 0x0000ff000000ff00);
            eight = (eight & 0xff0000ffff0000ff) | inner;
        }
        const uint64_t low = eight & 0x0f0f0f0f0f0f0f0f, more = eight >> 4 & 0x0303030303030303;
        const uint32_t words[2] = {(uint32_t)(bits >= 8 ? eight : low | low >> 28), (uint32_t)(eight >> 32)};
        memcpy(to + 64 * (bits >= 8 ? 2 * i : i), words, 4);
        if (bits >= 8)
            memcpy(to + 64 * (2 * i + 1), words + 1, 4);
        if (bits == 5)
            high[0] |= (uint32_t)(more | more >> 31) << 2 * i;
        if (bits == 6)
            high[i / 2] |= (uint32_t)(more | more >> 30) << 4 * (i % 2);
    }
    for (int part = 0; part < bits - 4 && bits < 8; part++)
        memcpy(to + 256 + 64 * part, high + part, 4);
}

/* Return code i in the low half of byte i, and code 16 + i in its high half. */
static ALWAYS void split_halves(const uint8_t *from, uint8_t codes[GROUP_INPUTS]) {
    for (int i = 0; i < GROUP_INPUTS / 2; i++) {
        codes[i] = from[i] & 15;
        codes[GROUP_INPUTS / 2 + i] = from[i] >> 4;
    }
}

/* Return the codes of group `g` of a GGUF file's block, whose low bits and high bits are given. */
static ALWAYS void file_codes(const int bits, const int is_split, const uint8_t *low, const uint8_t *high, int g,
                              uint8_t codes[GROUP_INPUTS]) {
    if (bits == 8) {
        memcpy(codes, low, GROUP_INPUTS);
        return;
    }
    if (is_split) { /* 16 bytes a group */
        split_halves(low + g * GROUP_INPUTS / 2, codes);
        for (int i = 0; bits == 5 && i < GROUP_INPUTS; i++)
            codes[i] |= (high[i / 8] >> i % 8 & 1) << 4;
        return;
    }
    const int shift = bits == 6 ? g % 4 / 2 * 4 : g % 2 * 4;
    low += bits == 6 ? g / 4 * 64 + g % 2 * 32 : g / 2 * 32;
    for (int i = 0; i < GROUP_INPUTS; i++) {
        codes[i] = low[i] >> shift & 15;
        if (bits == 5)
            codes[i] |= (high[i] >> g & 1) << 4;
        if (bits == 6)
            codes[i] |= (high[g / 4 * 32 + i] >> g % 4 * 2 & 3) << 4;
    }
}

/* Read the nested scales, and the minima behind 16 of them, of a GGUF file's block. */
static ALWAYS void file_scales(const int bits, const int has_minimum, const uint8_t *block, uint8_t scales[32]) {
    const uint8_t *s = block + (has_minimum ? 4 : 2);
    for (int g = 0; g < NESTED_GROUPS; g++)
        if (has_minimum) {
            scales[g] = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 2 & 48);
            scales[16 + g] = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | (s[g] >> 2 & 48);
        } else if (bits == 4) {
            scales[g] = (uint8_t)(((s[2 + g / 2] >> g % 2 * 4 & 15) | (s[g / 4] >> g % 4 * 2 & 3) << 4) - 32);
        }
    if (bits == 6)
        memcpy(scales, block + 192, 16);
}

/* Store a number of 16 bits. */
static ALWAYS void put_half(char *to, int lane, const uint8_t *half, int sign) {
    const uint8_t bytes[2] = {half[0], half[1] ^ sign};
    memcpy(to + 2 * lane, bytes, 2);
}

/* Pack one block of a GGUF file (ggml-common.h) into a panel's lane. Its layout follows from the format. */
static ALWAYS void pack_block(const struct format *f, const int bits, const int nested, const int has_minimum,
                              const uint8_t *block, char *to, int lane) {
    const int is_split = !nested || (bits == 4 && !has_minimum), numbers = 2 * (1 + has_minimum);
    const uint8_t *factors = nested && bits == 6 ? block + 208 : block, *high = block + numbers;
    const uint8_t *low = block + numbers + (bits == 5 ? 4 : 0);
    uint8_t scales[32], codes[GROUP_INPUTS];
    if (nested) {
        high = bits == 6 ? block + 128 : block + 16;
        low = bits == 6 ? block : block + (has_minimum ? 16 : 8) + (bits == 5 ? 32 : 0);
        file_scales(bits, has_minimum, block, scales);
        put_half(to, lane, factors, 0);
        if (has_minimum)
            put_half(to + 2 * BLOCK, lane, factors + 2, 0x80); /* ggml subtracts its minima */
        to += numbers * BLOCK;
    }
    for (int g = 0; g < (nested ? NESTED_GROUPS : 1); g++, to += group_bytes(f)) {
        char *behind = to + code_bytes(bits);
        file_codes(bits, is_split, low, high, g, codes);
        pack_group(bits, codes, to, lane);
        if (!nested) {
            put_half(behind, lane, block, 0);
            if (has_minimum)
                put_half(behind + 2 * BLOCK, lane, block + 2, 0);
        } else if (bits == 6) {
            behind[lane] = (char)scales[2 * g];
            behind[BLOCK + lane] = (char)scales[2 * g + 1];
        } else {
            behind[lane] = (char)scales[g];
            if (has_minimum)
                behind[BLOCK + lane] = (char)scales[16 + g];
        }
    }
}

/* Pack some panels of a matrix of blocks. */
static ALWAYS void pack_file_panels(const struct pack *p, const int bits, const int nested, const int has_minimum,
                                    int64_t first, int64_t last) {
    const int64_t groups = nested ? NESTED_GROUPS : 1, blocks = p->inputs / (groups * GROUP_INPUTS);
    const int64_t bytes = p->row_bytes / blocks;
    for (int64_t i = first * blocks; i < last * blocks; i++)
        for (int64_t row = i / blocks * BLOCK; row < p->rows && row < (i / blocks + 1) * BLOCK; row++)
            pack_block(p->format, bits, nested, has_minimum, p->codes + row * p->row_stride + i % blocks * bytes,
                       p->weight + i * block_bytes(p->format), row % BLOCK);
}

/* Pack the codes of some outputs. Memory between them, for the scales, is left as it is. */
static ALWAYS void pack_codes(const struct pack *p, const int bits, int64_t first, int64_t last) {
    const struct format *f = p->format;
    int64_t groups = block_groups(f), blocks = p->inputs / (groups * GROUP_INPUTS);
    for (int64_t row = first * BLOCK; row < last * BLOCK && row < p->rows; row++)
        for (int64_t g = 0; g < p->inputs / GROUP_INPUTS; g++) {
            char *block = p->weight + (row / BLOCK * blocks + g / groups) * block_bytes(f);
            const uint8_t *codes = p->codes + row * p->row_stride + g * p->group_stride;
            uint8_t separate[GROUP_INPUTS];
            if (p->halves)
                split_halves(codes, separate);
            pack_group(bits, p->halves ? separate : codes, block + header_bytes(f) + g % groups * group_bytes(f), row % BLOCK);
        }
}

static int pack_panels(const void *call, int64_t first, int64_t last) {
    const struct pack *p = call;
    const int bits = p->format->bits, nested = p->format->nested, has_minimum = p->format->has_minimum;
#define CASE(own, is_nested, minimum)                                                                              \
    if (p->row_bytes && bits == own && !nested == !is_nested && !has_minimum == !minimum)                          \
        pack_file_panels(p, own, is_nested, minimum, first, last);
    CASE(4, 0, 0) CASE(4, 0, 1) CASE(5, 0, 0) CASE(5, 0, 1) CASE(8, 0, 0)
    CASE(4, 1, 1) CASE(5, 1, 1) CASE(6, 1, 0) CASE(4, 1, 0)
#undef CASE
#define CASE(own)                                                                                                  \
    if (!p->row_bytes && bits == own)                                                                              \
        pack_codes(p, own, first, last);
    CASE(4) CASE(5) CASE(6) CASE(8) CASE(FLOAT8)
#undef CASE
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

static int pack(const void *call) { return pool_run(pack_panels, call, (((const struct pack *)call)->rows + BLOCK - 1) / BLOCK); }

static int unpack(const void *call) { return run_rows(unpack_rows, call, ((const struct unpack *)call)->rows); }
