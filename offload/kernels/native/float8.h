/*
 * Products with weights that are e4m3 numbers; included once per level, after tile.h and byte_products.h. They become
 * bf16, exactly, for as many inputs as share a scale, and are multiplied as bf16 weights are.
 */
enum { NAME(MOST_SCALED) = 4 * GROUP_INPUTS };

/* Return e4m3 numbers, one in each 16 bits, in bf16: the exponent's bias grows by 120, and a table has the subnormal ones. */
INLINE NAME(twos) NAME(float8)(NAME(twos) code) {
    static const int8_t low[16] = {0, 0, -0x80, -0x40, 0, 0x20, 0x40, 0x60};
    static const int8_t high[16] = {0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c};
    const NAME(twos) size = code & 0x7f, is_normal = (NAME(twos))(size > 7);
    const NAME(fours) index = (NAME(fours))(size & 15);
    const NAME(twos) subnormal = (NAME(twos))NAME(look_up)(low, index) | (NAME(twos))NAME(look_up)(high, index) << 8;
    return (code & 0x80) << 8 | (((size << 4) + (120 << 7)) & is_normal) | (subnormal & ~is_normal);
}

/* Convert some inputs of a panel to pairs of bf16, the layout of `struct linear`. */
INLINE void NAME(widen_float8)(const char *codes, int inputs, char *to) {
    for (int i = 0; i < inputs / 4 * VECTORS; i++)
        for (int odd = 0; odd < 2; odd++) {
            const NAME(twos) pairs = ((const NAME(twos_at) *)codes)[i] >> (8 * odd) & 0xff;
            ((NAME(twos_at) *)to)[(i / VECTORS * 2 + odd) * VECTORS + i % VECTORS] = NAME(float8)(pairs);
        }
}

/* Multiply rows, as tiles read them, with a panel: `c` is replaced. */
NOINLINE static void NAME(multiply_float8)(const struct linear *l, int rows, const char *x, int64_t panel, float *c,
                                           int64_t c_stride) {
    const struct format *f = l->format;
    const int inputs = block_groups(f) * GROUP_INPUTS, item = DOTS ? 2 : 4;
    const char *b = l->weight + panel * (l->inputs / inputs) * block_bytes(f);
    char weights[NAME(MOST_SCALED) * BLOCK * 2];
    float own[MAX_TILE * BLOCK];
    const char *start = weights, *next;
    struct NAME(tile) t = {.segments = 1, .a_stride = l->inputs * item, .c_stride = BLOCK, .b_step = 4 * BLOCK};
    t.b = &start, t.next = &next, t.pairs = inputs / 2, t.fresh = 1;
    for (int64_t k = 0; k < l->inputs; k += inputs, b += block_bytes(f), x += inputs * item) {
        next = b + block_bytes(f);
        NAME(widen_float8)(b + header_bytes(f), inputs, weights);
        for (int first = 0; first < rows; first += MAX_TILE) {
            const int some = rows - first < MAX_TILE ? rows - first : MAX_TILE;
            NAME(run_tiles)(some, 1, 0, t, x + first * t.a_stride, own);
            for (int i = 0; i < some * VECTORS; i++) {
                vec_at *to = (vec_at *)(c + (first + i / VECTORS) * c_stride) + i % VECTORS;
                const vec sum = NAME(at)(own, i) * NAME(at)(b, i % VECTORS);
                *to = k ? NAME(at)(to, 0) + sum : sum;
            }
        }
    }
}
