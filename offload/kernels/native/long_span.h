/*
 * Attention to several spans of plain keys and values at once; included once per level with DOTS, by attend.h.
 *
 * Tiles are entered and left once for all of them. Other levels add a tile's even and odd members when they leave it, so
 * that would change sums there. Numerators refer to the maximum that they would refer to if each span had been added
 * before the next one: the bits are the same. Only where a row must be rescaled, the spans before are added first.
 */
enum { NAME(LONG_SPANS) = LONG_SPAN / SPAN, NAME(LONG_BLOCKS) = LONG_SPAN / BLOCK };

#if HAS_MAX
/*
 * Do what `normalise` does of each span, for all spans of a row at once, with fewer instructions. Returns the first row
 * that sees only a part of the keys, or has to be rescaled; it and the rows after it are left as they are.
 */
NOINLINE static int NAME(normalise_long)(const float *scores, uint16_t *narrow, int rows, int64_t at, float factor,
                                         struct NAME(partial) p) {
    enum { VECTORS_OF_ROW = LONG_SPAN / LANES, EACH = SPAN / LANES };
    for (int r = 0; r < rows; r++, scores += LONG_SPAN, narrow += LONG_SPAN) {
        vec x[VECTORS_OF_ROW], most = NAME(splat)(-INFINITY);
        UNROLL for (int i = 0; i < VECTORS_OF_ROW; i++) {
            x[i] = NAME(at)(scores, i);
            most = NAME(max)(x[i], most);
        }
        float maximum = p.maximum[r];
        if (maximum == -INFINITY) /* nothing has been added: there is nothing to rescale */
            maximum = NAME(largest_lane)(NAME(max)(x[1], x[0])) * factor;
        if (p.views[r].start > at || p.views[r].end < at + LONG_SPAN || !(maximum - maximum == 0) ||
            NAME(any_above)(most * factor, maximum + SLACK))
            return r;
        p.maximum[r] = maximum;
        UNROLL for (int i = 0; i < VECTORS_OF_ROW; i++) {
            x[i] = NAME(exp2)(x[i] * factor - maximum);
            NAME(store_narrow)(narrow + i * LANES, x[i]);
        }
        UNROLL for (int i = 0; i < VECTORS_OF_ROW; i += EACH)
            p.lanes[r] += x[i] + x[i + 1];
    }
    return rows;
}
#endif

/*
 * Add LONG_SPAN keys from position `at` on, whose blocks are given, to the partial result of rows `first` to
 * `first + rows - 1` of those whose queries are loaded.
 */
INLINE void NAME(add_long_span)(const struct attention *a, struct NAME(work) *w, int first, int rows, int64_t at,
                                const char *const *keys, const char *const *values, const char *const *next_keys,
                                const char *const *next_values, struct NAME(partial) all) {
    enum { BLOCKS = SPAN / BLOCK };
    const int dim = a->head_dim;
    const float factor = a->scale * 1.44269504f, *queries = w->queries + first * dim / 2; /* in bf16 */
    const struct NAME(partial) p = NAME(rows_from)(all, first, dim);
    int added = 0, done = 0; /* spans; rows */
    NAME(score)(a, queries, keys, next_keys, NAME(LONG_BLOCKS), rows, 0, w->scores, LONG_SPAN);
#if HAS_MAX
    done = NAME(normalise_long)(w->scores, w->weights, rows, at, factor, p);
#endif
    for (int s = 0; s < NAME(LONG_SPANS) && done < rows; s++) {
        float *scores = w->scores + s * SPAN;
        uint16_t *narrow = w->weights + s * SPAN;
        const int64_t from = at + s * SPAN;
        int row = NAME(normalise)(scores, narrow, LONG_SPAN, done, rows, from, SPAN, factor, SLACK, dim, s == added, p);
        if (row == rows)
            continue;
        NAME(gather_from)(a, w, added * SPAN, LONG_SPAN, values + added * BLOCKS, next_values + added * BLOCKS,
                          (s - added) * BLOCKS, rows, 0, p.out);
        added = s;
        NAME(normalise)(scores, narrow, LONG_SPAN, row, rows, from, SPAN, factor, SLACK, dim, 1, p);
    }
    NAME(gather_from)(a, w, added * SPAN, LONG_SPAN, values + added * BLOCKS, next_values + added * BLOCKS,
                      (NAME(LONG_SPANS) - added) * BLOCKS, rows, 0, p.out);
}

/*
 * Add the keys from `start` on, as many as long spans have, of those before `end`, and prefetch the first ones after them,
 * of those before `ahead`; return where they end. A tile of rows goes through a span before the next tile does, so that
 * its scores and numerators stay in the L1 cache. The next span is prefetched in the order of memory, in equal parts during
 * the products of the first tiles: all at once it would be on the way longer than one takes.
 */
NOINLINE static int64_t NAME(add_long_spans)(const struct attention *a, struct NAME(work) *w, int head, int rows,
                                             int64_t start, int64_t end, int64_t ahead, struct NAME(partial) p) {
    const int64_t half = (int64_t)2 * BLOCK * a->head_dim;
    const int tiles = rows > (NAME(LONG_BLOCKS) - 1) * FEW_ROWS ? NAME(LONG_BLOCKS) : (rows + FEW_ROWS - 1) / FEW_ROWS;
    const char *cached = (const char *)w->queries;
    int64_t at = start;
    for (; !a->wide && !a->quantized && at + LONG_SPAN <= end; at += LONG_SPAN) {
        const char *keys[NAME(LONG_BLOCKS)], *values[NAME(LONG_BLOCKS)], *next[NAME(LONG_BLOCKS)];
        for (int j = 0; j < NAME(LONG_BLOCKS); j++) {
            const int64_t after = at + LONG_SPAN + j * BLOCK;
            keys[j] = NAME(block)(a, head, at / BLOCK + j);
            values[j] = keys[j] + half;
            next[j] = after < ahead ? NAME(block)(a, head, after / BLOCK) : keys[j];
        }
        for (int r = 0; r < rows; r += FEW_ROWS) {
            const int some = rows - r < FEW_ROWS ? rows - r : FEW_ROWS;
            const char *soon[2][NAME(LONG_BLOCKS)] = {{cached, cached, cached, cached}, {cached, cached, cached, cached}};
            for (int i = 0, n = 0, before = -1; i < 2 * NAME(LONG_BLOCKS); i++) {
                const int product = i * tiles / NAME(LONG_BLOCKS); /* each tile has two: by keys and by values */
                n = product == before ? n + 1 : 0, before = product;
                if (product / 2 == r / FEW_ROWS)
                    soon[product % 2][n * tiles] = next[i / 2] + i % 2 * half; /* the keys or the values of a block */
            }
            NAME(add_long_span)(a, w, r, some, at, keys, values, soon[0], soon[1], p);
        }
    }
    return at;
}
