/*
 * Products with quantised weights; included once per level, after byte_products.h. The layout is in types.h.
 *
 * Weights stay codes of a byte, and an activation becomes two signed digits of 8 bits: unit * (256 high + low), with one
 * unit, a power of two, for a group of 32 inputs. An activation in bf16 above 1/128 of the group's largest magnitude
 * is exact; others are rounded to 1/32,000 of that magnitude, a sixtieth of bf16's rounding of the output. A
 * group that has an infinity or NaN makes all outputs of its row NaN.
 *
 * Sums of a group are exact integers, and floats are added in the order of the inputs, never fused: a row's bits depend
 * neither on the other rows nor on the level.
 */
enum { NAME(TILE_ROWS) = HAS_MAX ? 8 : 2, NAME(SLICE) = 1024 }; /* rows of a tile; inputs of a panel that stay cached */

/* A group of a row of activations. */
struct NAME(digits) {
    int8_t digits[2 * GROUP_INPUTS]; /* the high ones, then the low ones; or 16 bits each, see `add_products` */
    float unit, sum;                 /* sum: of the numbers in units */
    int32_t offsets[2];              /* `level_base` times their sum; two with scales for 16 inputs */
};

/* How codes become the bytes that are multiplied: they are levels without `level_base`, unsigned or signed. */
enum { NAME(PLAIN_4), NAME(PLAIN_5), NAME(PLAIN_6), NAME(BYTES_8), NAME(SMALL_TABLE), NAME(TABLE), NAME(KINDS) };

#define IS_WIDE(kind) (!BYTE_DOTS && ((kind) == NAME(BYTES_8) || (kind) == NAME(TABLE)))
#define BITS_OF(kind) ((kind) == NAME(PLAIN_5) ? 5 : (kind) == NAME(PLAIN_6) ? 6 : (kind) == NAME(BYTES_8) ? 8 : 4)

/* Operands of tiles: rows of groups of activations, and blocks of a panel. */
struct NAME(code_tile) {
    const struct format *format;
    const char *panel;
    int64_t blocks, x_stride, c_stride; /* strides between rows: groups, floats */
    int8_t table[16];
};

INLINE int NAME(kind_of)(const struct format *f) {
    if (f->bits != 4 || f->base <= 0)
        return f->bits == 8 ? NAME(BYTES_8) : NAME(PLAIN_4) + f->bits - 4;
    for (int i = 0; i < 16; i++)
        if (fabsf(widen(f->levels[i])) > SMALL_LEVEL)
            return NAME(TABLE);
    return NAME(SMALL_TABLE);
}

/* Return what is added to a byte to get its level. */
INLINE int NAME(level_base)(const struct format *f) {
    const int kind = NAME(kind_of)(f);
    if (kind == NAME(SMALL_TABLE))
        return -SMALL_LEVEL;
    if (kind == NAME(TABLE) || kind == NAME(BYTES_8))
        return UNSIGNED_CODES ? -128 : 0;
    return f->base;
}

UNFUSED
/* Convert a group of activations for a kind of codes. */
INLINE void NAME(split_group)(const uint16_t *x, int kind, int32_t base, struct NAME(digits) *to) {
    enum { MAGIC = 0x4b400000 }; /* 1.5 * 2^23: adding it rounds to an integer */
    const vec magic = NAME(splat)(12582912.0f);
    vec numbers[GROUP_INPUTS / LANES], sums[2] = {NAME(splat)(0), NAME(splat)(0)};
    ints whole[GROUP_INPUTS / LANES], high[GROUP_INPUTS / LANES], largest = {0};
    UNROLL for (int i = 0; i < GROUP_INPUTS / LANES; i++) {
        numbers[i] = NAME(load)(x, i * LANES, 0);
        const ints size = (ints)numbers[i] & 0x7fffffff, more = size > largest;
        largest = (size & more) | (largest & ~more);
    }
    UNROLL for (int width = LANES / 2; width; width /= 2) {
        const ints other = (ints)NAME(exchange)((vec)largest, width), more = other > largest;
        largest = (other & more) | (largest & ~more);
    }
    const uint32_t bits = (uint32_t)largest[0];
    if (bits >= 0x7f800000) {
        *to = (struct NAME(digits)){.unit = NAN};
        return;
    }
    /* The largest number has at most 254 * 2^7 units: a mantissa of 255 is rounded up to the next power of two. */
    uint32_t exponent = (bits + 0x10000) >> 23;
    exponent = exponent < 15 ? 15 : exponent;
    const uint32_t unit = (exponent - 14) << 23, inverse = (268 - exponent) << 23;
    float factor;
    memcpy(&to->unit, &unit, 4);
    memcpy(&factor, &inverse, 4);
    UNROLL for (int i = 0; i < GROUP_INPUTS / LANES; i++) {
        const vec rounded = numbers[i] * factor + magic;
        sums[kind == NAME(PLAIN_6) && i >= GROUP_INPUTS / LANES / 2] += rounded - magic;
        whole[i] = (ints)rounded - MAGIC;
        high[i] = (whole[i] + 128) >> 8;
    }
    const float first = NAME(sum_lanes)(sums[0]), second = NAME(sum_lanes)(sums[1]); /* exact */
    to->sum = first + second;
    to->offsets[0] = base * (int32_t)first, to->offsets[1] = base * (int32_t)second;
    if (IS_WIDE(kind)) {
        NAME(put_words)(to->digits, whole);
        return;
    }
    NAME(put_bytes)(to->digits, high);
    UNROLL for (int i = 0; i < GROUP_INPUTS / LANES; i++)
        whole[i] -= high[i] << 8;
    NAME(put_bytes)(to->digits + GROUP_INPUTS, whole);
}

/* Where the numbers of a group are. */
struct NAME(scaling) {
    int nested, wide, has_minimum, bytes, minima; /* bytes: of scales, behind the codes; minima: in the outer ones */
};

/* Return scales, or minima, of a group for one vector of outputs; `outer` are those of the block, or factors. */
INLINE vec NAME(scales_of)(struct NAME(scaling) s, const char *own, const char *outer, int vector) {
    if (s.wide)
        return NAME(at)(outer, vector);
    return s.nested ? NAME(halves)(outer, vector) * NAME(small)(own, vector) : NAME(halves)(own, vector);
}

/* Return bytes 4 i to 4 i + 3 of a group, for one vector of outputs. `kind` and `i` are constants. */
INLINE NAME(fours) NAME(load_codes)(const int kind, const struct NAME(code_tile) *t, const char *group, const int i, int vector) {
    const NAME(twos_at) *at = (const NAME(twos_at) *)(group + 4 * LANES * vector);
    if (kind == NAME(BYTES_8))
        return (NAME(fours))at[16 * i / LANES] ^ (int8_t)(UNSIGNED_CODES ? -128 : 0);
    NAME(twos) codes = at[16 * (i / 2) / LANES] >> (i % 2 ? 4 : 0) & 0x0f0f;
    if (kind == NAME(PLAIN_5)) {
        const NAME(twos) high = at[64 / LANES];
        codes |= (i < 4 ? high << (4 - i) : high >> (i - 4)) & 0x1010;
    }
    if (kind == NAME(PLAIN_6)) {
        const NAME(twos) high = at[(64 + i / 4 * 16) / LANES];
        codes |= (i % 4 < 2 ? high << (4 - i % 4 * 2) : high >> (i % 4 * 2 - 4)) & 0x3030;
    }
    if (kind == NAME(TABLE) || kind == NAME(SMALL_TABLE))
        return NAME(look_up)(t->table, (NAME(fours))codes);
    return (NAME(fours))codes;
}

/* Add the products of a group and a tile of rows to `c`. `rows` and `kind` are constants. */
INLINE void NAME(add_group)(const int rows, const int kind, const struct NAME(code_tile) *t, struct NAME(scaling) f,
                            const char *group, const char *outer, const struct NAME(digits) *x, float *c) {
    enum { MOST = 4 }; /* vectors of codes at a time */
    const int is_wide = IS_WIDE(kind);
    const int count = BYTE_DOTS ? MOST : is_wide ? 1 : kind == NAME(PLAIN_6) ? 2 : MOST;
    const int halves = kind == NAME(PLAIN_6) ? 2 : 1;
    const char *scales = group + code_bytes(BITS_OF(kind));
    ROLLED for (int v = 0; v < VECTORS; v++) {
        vec sums[NAME(TILE_ROWS)];
        UNROLL for (int half = 0; half < halves; half++) {
            struct NAME(sums) s[NAME(TILE_ROWS)];
            UNROLL for (int r = 0; r < rows; r++)
                s[r] = (struct NAME(sums)){0};
            UNROLL for (int i = 0; i < 8 / halves; i += count) {
                const int first = half * 4 + i;
                NAME(fours) codes[MOST];
                UNROLL for (int k = 0; k < count; k++)
                    codes[k] = NAME(load_codes)(kind, t, group, first + k, v);
                UNROLL for (int r = 0; r < rows; r++)
                    NAME(add_products)(count, is_wide, codes, x[r * t->x_stride].digits + (is_wide ? 8 : 4) * first, s + r);
            }
            const vec scale = NAME(scales_of)(f, scales + half * f.bytes, outer, v);
            UNROLL for (int r = 0; r < rows; r++) {
                const ints sum = NAME(sum_of)(s[r]) + x[r * t->x_stride].offsets[half];
                const vec scaled = __builtin_convertvector(sum, vec) * scale;
                sums[r] = half ? sums[r] + scaled : scaled;
            }
        }
        if (f.has_minimum) {
            const vec least = NAME(scales_of)(f, scales + halves * f.bytes, outer + f.minima, v);
            UNROLL for (int r = 0; r < rows; r++)
                sums[r] += least * x[r * t->x_stride].sum;
        }
        UNROLL for (int r = 0; r < rows; r++)
            ((vec_at *)(c + r * t->c_stride))[v] += sums[r] * x[r * t->x_stride].unit;
    }
}

/* Add the products of all blocks and a tile of rows to `c`. `rows` and `kind` are constants. */
INLINE void NAME(run_codes)(const int rows, const int kind, const struct NAME(code_tile) *t, const struct NAME(digits) *x,
                            float *c) {
    enum { AHEAD = 2048 }; /* bytes that are being read */
    const struct format *f = t->format;
    const struct NAME(scaling) scaling = {f->nested, f->wide, f->has_minimum, scale_bytes(f), header_bytes(f) / 2};
    const int64_t bytes = group_bytes(f), groups = block_groups(f), header = header_bytes(f);
    const char *b = t->panel;
    for (int64_t block = 0; block < t->blocks; block++) {
        const char *outer = b;
        b += header;
        for (int64_t g = 0; g < groups; g++, b += bytes, x++) {
            ROLLED for (int line = 0; line < bytes; line += 64)
                __builtin_prefetch(b + AHEAD + line);
            NAME(add_group)(rows, kind, t, scaling, b, outer, x, c);
        }
    }
}

typedef void NAME(code_rows)(const struct NAME(code_tile) *, const struct NAME(digits) *, float *);
#define TILE(rows, kind)                                                                                           \
    NOINLINE static void NAME(tile_##rows##_##kind)(const struct NAME(code_tile) *t, const struct NAME(digits) *x, \
                                                    float *c) {                                                    \
        NAME(run_codes)(rows, NAME(kind), t, x, c);                                                                \
    }
#if HAS_MAX
#define TILES(kind)                                                                                                \
    TILE(1, kind) TILE(2, kind) TILE(3, kind) TILE(4, kind) TILE(6, kind) TILE(8, kind)                            \
    static NAME(code_rows) *const NAME(tiles_##kind)[] = {                                                         \
        [1] = NAME(tile_1_##kind), [2] = NAME(tile_2_##kind), [3] = NAME(tile_3_##kind),                           \
        [4] = NAME(tile_4_##kind), [6] = NAME(tile_6_##kind), [8] = NAME(tile_8_##kind)};
#else /* compiling less matters more than speed */
#define TILES(kind)                                                                                                \
    TILE(1, kind) TILE(2, kind)                                                                                    \
    static NAME(code_rows) *const NAME(tiles_##kind)[] = {[1] = NAME(tile_1_##kind), [2] = NAME(tile_2_##kind)};
#endif
TILES(PLAIN_4) TILES(PLAIN_5) TILES(PLAIN_6) TILES(BYTES_8) TILES(SMALL_TABLE) TILES(TABLE)
#undef TILE
#undef TILES
END_UNFUSED

/* Multiply any number of rows with a panel: `c` is replaced. Many rows share slices of it, which stay in the L1 cache. */
NOINLINE static void NAME(multiply_codes)(const struct linear *l, int rows, const struct NAME(digits) *x, int64_t panel,
                                          float *c, int64_t c_stride) {
    static NAME(code_rows) *const *const kinds[NAME(KINDS)] = {
        NAME(tiles_PLAIN_4), NAME(tiles_PLAIN_5), NAME(tiles_PLAIN_6), NAME(tiles_BYTES_8), NAME(tiles_SMALL_TABLE),
        NAME(tiles_TABLE)};
    const struct format *f = l->format;
    const int64_t groups = l->inputs / GROUP_INPUTS, inputs = block_groups(f) * GROUP_INPUTS, bytes = block_bytes(f);
    const int64_t slice = rows > NAME(TILE_ROWS) ? NAME(SLICE) : l->inputs;
    NAME(code_rows) *const *tiles = kinds[NAME(kind_of)(f)];
    struct NAME(code_tile) t = {.format = f, .x_stride = groups, .c_stride = c_stride};
    const int base = NAME(level_base)(f);
    for (int i = 0; i < 16; i++)
        t.table[i] = (int8_t)(int)(widen(f->levels[i]) - base);
    for (int r = 0; r < rows; r++)
        memset(c + r * c_stride, 0, 4 * BLOCK);
    for (int64_t k = 0; k < l->inputs; k += slice) {
        t.panel = l->weight + (panel * l->inputs + k) / inputs * bytes;
        t.blocks = (l->inputs - k < slice ? l->inputs - k : slice) / inputs;
        for (int first = 0, some; first < rows; first += some) {
            some = rows - first < NAME(TILE_ROWS) ? rows - first : NAME(TILE_ROWS);
            while (!tiles[some])
                some--;
            tiles[some](&t, x + first * groups + k / GROUP_INPUTS, c + first * c_stride);
        }
    }
}
