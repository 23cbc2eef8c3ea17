/*
 * Quantising keys and values; included once per level, in the same bits. A lane is a token of keys, a dimension of
 * values, as in blocks and in lines of codes: no number changes lane.
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

/* Find the limits of each row, and whether all of its numbers are finite. */
INLINE void NAME(find_limits)(const struct NAME(numbers) *n, const int keys, const int wide, struct grids *g) {
    const int rows = keys ? n->dim : SPAN, columns = (keys ? SPAN : n->dim) / LANES;
    memset(g->is_odd, 0, sizeof g->is_odd);
    for (int first = 0; first < rows; first += LANES) {
        vec most[LANES], least[LANES]; /* the latter of negated numbers */
        ints odd[LANES], any = {0};
        UNROLL for (int i = 0; i < LANES; i++) {
            most[i] = NAME(some_numbers)(n, keys, wide, first + i, 0), least[i] = -most[i];
            odd[i] = (ints)(most[i] - most[i]); /* no bit is set if all are finite */
            for (int column = 1; column < columns; column++) {
                vec x = NAME(some_numbers)(n, keys, wide, first + i, column);
                most[i] = NAME(max)(most[i], x), least[i] = NAME(max)(least[i], -x);
                odd[i] |= (ints)(x - x);
            }
            any |= odd[i];
        }
        int32_t is_any = 0;
        for (int lane = 0; lane < LANES; lane++)
            is_any |= any[lane];
        for (int i = 0; is_any && i < LANES; i++)
            for (int lane = 0; lane < LANES; lane++)
                g->is_odd[first + i] |= odd[i][lane];
        *(vec_at *)(g->most + first) = NAME(largest_of_each)(most);
        *(vec_at *)(g->least + first) = -NAME(largest_of_each)(least);
    }
}

/* Return the codes of LANES numbers of a row, unsigned. */
INLINE ints NAME(codes)(const struct NAME(numbers) *n, const int keys, const int wide, const struct grids *g, int row,
                        int column) {
    vec x = NAME(some_numbers)(n, keys, wide, row, column);
    vec steps = (x - NAME(splat)(g->middle[row])) * NAME(splat)(g->inverse[row]);
    steps = NAME(max)(-NAME(max)(-steps, NAME(splat)(-127)), NAME(splat)(-128));
    const ints has_codes = NAME(splat)(g->inverse[row]) > 0;
    return (ints)(steps + 12582912.0f) & has_codes & 255; /* 1.5 * 2^23: adding it rounds to an integer */
}

/* Store the codes of keys, or of values. A line has those of four rows, of keys consecutive, of values neighbours. */
INLINE void NAME(put_codes)(const struct NAME(numbers) *n, const int keys, const int wide, const struct grids *g,
                            char *to) {
    const int rows = keys ? n->dim : BLOCK, step = keys ? 4 : 2;
    for (int block = 0; block < (keys ? 2 : n->dim / BLOCK); block++)
        for (int row = 0; row < rows; row += step, to += 64)
            UNROLL for (int v = 0; v < VECTORS; v++) {
                ints line = {0};
                UNROLL for (int k = 0; k < 4; k++)
                    line |= NAME(codes)(n, keys, wide, g, row + (keys ? k : k / 2 + k % 2 * BLOCK), block * VECTORS + v)
                            << 8 * k;
                ((ints_at *)to)[v] = line;
            }
}

/* Quantise a group; `wide` is a constant. */
INLINE void NAME(quantize_group)(const struct quantize *j, const int wide, const int32_t *item) {
    const int dim = j->head_dim;
    const int64_t half = (int64_t)BLOCK * dim * (wide ? 4 : 2);
    const char *blocks = j->kv + item[0] * j->head_stride + item[1] * 2 * half;
    char *group = j->quantized + item[0] * j->quantized_stride + item[2] * kv_group_bytes(j->format, dim);
    struct NAME(numbers) keys = {blocks, 2 * half, dim}, values = {blocks + half, 2 * half, dim};
    struct grids key_grids, value_grids;
    NAME(find_limits)(&keys, 1, wide, &key_grids);
    NAME(find_limits)(&values, 0, wide, &value_grids);
    fit_grids(&key_grids, dim, (uint16_t *)group);
    fit_grids(&value_grids, SPAN, (uint16_t *)group + 2 * dim);
    NAME(put_codes)(&keys, 1, wide, &key_grids, (char *)key_codes(group, dim));
    NAME(put_codes)(&values, 0, wide, &value_grids, (char *)value_codes(group, dim));
}

TARGET static int NAME(quantize_groups)(const void *call, int64_t first, int64_t last) {
    const struct quantize *j = call;
    for (const int32_t *item = j->groups + 3 * first; item < j->groups + 3 * last; item += 3)
        if (j->wide)
            NAME(quantize_group)(j, 1, item);
        else
            NAME(quantize_group)(j, 0, item);
    return 0;
}

TARGET static int NAME(quantize)(const void *call) {
    const struct quantize *q = call;
    return run_rows(q->keys ? dequantize_groups : NAME(quantize_groups), q, q->count);
}
