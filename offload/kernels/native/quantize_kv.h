/*
 * Quantising keys and values with vectors, in the bits of kv_groups.h; included once per level that has instructions
 * for them. A lane is a token of keys, a dimension of values, as in blocks and in lines of codes: no number changes lane.
 */
struct NAME(numbers) { /* of a group's two blocks: the keys, or the values */
    const char *first;
    int64_t stride; /* bytes between the blocks */
    int dim;
};

/* Load LANES keys of dimension `row`; vectors `column` count through a group's tokens. */
INLINE vec NAME(some_keys)(const struct NAME(numbers) *n, const int wide, int row, int column) {
    const char *block = n->first + column / VECTORS * n->stride;
    if (wide)
        return NAME(at)(block + row * 64, column % VECTORS);
    ints pairs = ((const ints_at *)(block + row / 2 * 64))[column % VECTORS];
    return row % 2 ? NAME(high_half)(pairs) : NAME(low_half)(pairs);
}

/* Load LANES values of token `row`; vectors `column` count through its dimensions. */
INLINE vec NAME(some_values)(const struct NAME(numbers) *n, const int wide, int row, int column) {
    const char *block = n->first + row / BLOCK * n->stride;
    if (wide)
        return NAME(at)(block + row % BLOCK * n->dim * 4, column);
    ints pairs = ((const ints_at *)(block + row % BLOCK / 2 * n->dim * 4))[column];
    return row % 2 ? NAME(high_half)(pairs) : NAME(low_half)(pairs);
}

INLINE vec NAME(some_numbers)(const struct NAME(numbers) *n, const int keys, const int wide, int row, int column) {
    return keys ? NAME(some_keys)(n, wide, row, column) : NAME(some_values)(n, wide, row, column);
}

/* Return a vector whose lane i is the largest lane of x[i], which it overwrites. */
INLINE vec NAME(largest_of_each)(vec x[LANES]) {
#ifdef __clang__
    vec largest = x[0];
    for (int i = 0; i < LANES; i++)
        for (int lane = 0; lane < LANES; lane++)
            largest[i] = lane == 0 || x[i][lane] > largest[i] ? x[i][lane] : largest[i];
    return largest;
#else
    ints lane = {0};
    for (int i = 0; i < LANES; i++)
        lane[i] = i;
    UNROLL for (int width = LANES / 2; width; width /= 2) {
        ints own = lane + (lane & width) * (LANES / width), other = own ^ width; /* of x[i], or of x[i + width] */
        UNROLL for (int i = 0; i < width; i++)
            x[i] = NAME(max)(__builtin_shuffle(x[i], x[i + width], own), __builtin_shuffle(x[i], x[i + width], other));
    }
    return x[0];
#endif
}

/* Find the limits of each row; return bits, none of them set if all numbers are finite. */
INLINE ints NAME(find_limits)(const struct NAME(numbers) *n, const int keys, const int wide, struct grids *g) {
    const int rows = keys ? n->dim : SPAN, columns = (keys ? SPAN : n->dim) / LANES;
    ints wrong = {0};
    for (int first = 0; first < rows; first += LANES) {
        vec most[LANES], least[LANES]; /* the latter of negated numbers */
        UNROLL for (int i = 0; i < LANES; i++) {
            most[i] = NAME(some_numbers)(n, keys, wide, first + i, 0), least[i] = -most[i];
            wrong |= (ints)(most[i] - most[i]);
            for (int column = 1; column < columns; column++) {
                vec x = NAME(some_numbers)(n, keys, wide, first + i, column);
                most[i] = NAME(max)(most[i], x), least[i] = NAME(max)(least[i], -x);
                wrong |= (ints)(x - x);
            }
        }
        *(vec_at *)(g->most + first) = NAME(largest_of_each)(most);
        *(vec_at *)(g->least + first) = -NAME(largest_of_each)(least);
    }
    return wrong;
}

/* Return e4m3 codes of numbers up to 448, rounded to nearest, ties to even. */
INLINE ints NAME(float8_codes)(vec x) {
    ints size = (ints)x & 0x7fffffff, small = size < 0x3c800000; /* 2^-6: those below are subnormal */
    ints normal = (ints)(((uints)size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    ints subnormal = (ints)((vec)size * 512 + 12582912.0f) & 15;
    return (small & subnormal) | (~small & normal) | ((x < 0) & 0x80);
}

/* Return the codes of LANES numbers of a row, unsigned. */
INLINE ints NAME(codes)(const struct NAME(numbers) *n, const int keys, const int bits, const int wide,
                        const struct grids *g, int row, int column) {
    const float most = bits == 4 ? 7 : 127;
    vec x = NAME(some_numbers)(n, keys, wide, row, column);
    vec steps = (x - NAME(splat)(g->middle[row])) * NAME(splat)(g->inverse[row]);
    if (bits == FLOAT8)
        return NAME(float8_codes)(steps);
    steps = NAME(max)(-NAME(max)(-steps, NAME(splat)(-most)), NAME(splat)(-most - 1));
    return (ints)(steps + 12582912.0f) & (bits == 4 ? 15 : 255); /* 1.5 * 2^23: adding it rounds to an integer */
}

/* Return part of a line: the codes of four rows, of keys consecutive, of values `row` and its neighbours. */
INLINE ints NAME(line_codes)(const struct NAME(numbers) *n, const int keys, const int bits, const int wide,
                             const struct grids *g, int row, int column) {
    ints line = {0};
    UNROLL for (int k = 0; k < 4; k++)
        line |= NAME(codes)(n, keys, bits, wide, g, row + (keys ? k : k / 2 + k % 2 * BLOCK), column) << 8 * k;
    return line;
}

/* Store the codes of keys, or of values. */
INLINE void NAME(put_codes)(const struct NAME(numbers) *n, const int keys, const int bits, const int wide,
                            const struct grids *g, char *to) {
    const int rows = keys ? n->dim : BLOCK, step = keys ? 4 : 2; /* of a line */
    for (int block = 0; block < (keys ? 2 : n->dim / BLOCK); block++)
        for (int row = 0; row < rows; row += bits == 4 ? 2 * step : step, to += 64)
            UNROLL for (int v = 0; v < VECTORS; v++) {
                ints line = NAME(line_codes)(n, keys, bits, wide, g, row, block * VECTORS + v);
                if (bits == 4)
                    line |= NAME(line_codes)(n, keys, bits, wide, g, row + step, block * VECTORS + v) << 4;
                ((ints_at *)to)[v] = line;
            }
}

/* Quantise a group; `bits` and `wide` are constants. */
INLINE void NAME(quantize_group)(const struct quantize *j, const int bits, const int wide, const int32_t *item) {
    const int dim = j->head_dim;
    const int64_t half = (int64_t)BLOCK * dim * (wide ? 4 : 2);
    const char *blocks = j->kv + item[0] * j->head_stride + item[1] * 2 * half;
    char *group = j->quantized + item[0] * j->quantized_stride + item[2] * kv_group_bytes(j->format, dim);
    struct NAME(numbers) keys = {blocks, 2 * half, dim}, values = {blocks + half, 2 * half, dim};
    struct grids key_grids, value_grids;
    ints wrong = NAME(find_limits)(&keys, 1, wide, &key_grids) | NAME(find_limits)(&values, 0, wide, &value_grids);
    int32_t any = 0;
    for (int i = 0; i < LANES; i++)
        any |= wrong[i];
    if (any) {
        quantize_by_number(j, item);
        return;
    }
    fit_grids(bits, &key_grids, dim, (uint16_t *)group);
    fit_grids(bits, &value_grids, SPAN, (uint16_t *)group + 2 * dim);
    NAME(put_codes)(&keys, 1, bits, wide, &key_grids, (char *)key_codes(group, dim));
    NAME(put_codes)(&values, 0, bits, wide, &value_grids, (char *)value_codes(j->format, group, dim));
}

#define QUANTIZE(bits)                                                                                             \
    case bits: j->wide ? NAME(quantize_group)(j, bits, 1, item) : NAME(quantize_group)(j, bits, 0, item); break;
TARGET static int NAME(quantize_groups)(const void *call, int64_t first, int64_t last) {
    const struct quantize *j = call;
    for (const int32_t *item = j->groups + 3 * first; item < j->groups + 3 * last; item += 3)
        switch (j->format->bits) {
            QUANTIZE(4) QUANTIZE(8) QUANTIZE(FLOAT8)
        }
    return 0;
}
#undef QUANTIZE
