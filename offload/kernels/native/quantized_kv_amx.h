/*
 * Attention over quantised keys and values by AMX; included by attend_amx.h.
 *
 * As in quantized_bytes.h, the other factor becomes integers of two digits, here with a unit for each row and piece. Each
 * digit is a row of tiles of its own, and codes are signed. Codes of 8 bits are multiplied where they lie; those of 4 bits
 * become bytes first. Middles of keys are multiplied by queries in bf16, all groups of a piece at once.
 */
/* The largest scales of a piece's keys, and a copy of the middles. NaN is passed over: it is in the middles too. */
INLINE void collect_key_numbers(int dim, struct byte_work *f, const struct piece_blocks *found, int spans) {
    for (int d = 0; d < dim; d += 32) {
        vec even = NAME(splat)(0), odd = even;
        for (int span = 0; span < spans; span++)
            if (found->groups[span]) {
                const uint16_t *scales = (const uint16_t *)found->groups[span] + d;
                struct deinterleaved s = deinterleave(scales);
                even = NAME(max)(s.even, even), odd = NAME(max)(s.odd, odd);
                memcpy(f->middles[span] + d, scales + dim, 64);
            }
        *(vec_at *)(f->largest + d) = even;
        *(vec_at *)(f->largest + d + LANES) = odd;
    }
}

/* Convert a row of queries to floats, in units of its integers. */
INLINE void widen_query(int dim, struct byte_work *f, const uint16_t *query, int row) {
    float *to = f->queries + row * MAX_HEAD_DIM, inverse;
    vec largest = NAME(splat)(0);
    for (int d = 0; d < dim; d += 32) {
        struct deinterleaved q = deinterleave(query + d);
        for (int i = (dim - d) / 2; i < LANES; i++)
            q.even[i] = q.odd[i] = 0;
        largest = NAME(max)(NAME(magnitude)(q.even * *(vec_at *)(f->largest + d)), largest);
        largest = NAME(max)(NAME(magnitude)(q.odd * *(vec_at *)(f->largest + d + LANES)), largest);
        *(vec_at *)(to + d) = q.even;
        *(vec_at *)(to + d + LANES) = q.odd;
    }
    f->units[row] = NAME(unit_of)(NAME(largest_lane)(largest), &inverse);
    for (int d = 0; d < dim; d += 32) {
        *(vec_at *)(to + d) *= inverse;
        *(vec_at *)(to + d + LANES) *= inverse;
    }
}

/* Multiply rows of queries by the scales of a group's keys; digits of a row are `stride` bytes apart. */
INLINE void multiply_by_scales(int dim, const struct byte_work *f, const char *group, int rows, int8_t *to, int stride) {
    for (int d = 0; d < dim; d += 32) {
        struct deinterleaved s = deinterleave((const uint16_t *)group + d);
        for (int r = 0; r < rows; r++) {
            const float *q = f->queries + r * MAX_HEAD_DIM + d;
            int8_t *high = to + 2 * r * stride + d;
            vec even = *(const vec_at *)q * s.even + ROUND_TO_DIGITS;
            vec odd = *(const vec_at *)(q + LANES) * s.odd + ROUND_TO_DIGITS;
            store_digits(even, odd, high, high + stride);
        }
    }
}

/* Write codes of 4 bits as bytes, 16 times as large. */
INLINE void spread_codes(const char *codes, int lines, int8_t *to) {
    for (int line = 0; line < lines; line += 2, codes += 64, to += 128) {
        ints both = *(const ints_at *)codes;
        *(ints_at *)to = both << 4 & (int32_t)0xf0f0f0f0;
        *(ints_at *)(to + 64) = both & (int32_t)0xf0f0f0f0;
    }
}

/* Multiply each row with the middles of all groups of the piece: `sums` [groups][rows]. */
INLINE void multiply_middles(int dim, struct byte_work *f, const uint16_t *queries, int rows) {
    const int pairs = dim % 32 ? 8 : 16;
    set_tile_shapes(16, pairs);
    for (int first = 0; first < rows; first += 16) {
        for (int r = 0; r < 16 && first + r < rows; r++)
            for (int i = 0; i < dim / 2; i++)
                f->columns[i][r] = ((const NAME(pair_at) *)(queries + (first + r) * dim))[i];
        TILE_FENCE();
        TILE_ZERO(0);
        for (int i = 0; i < dim / 2; i += pairs) {
            TILE_LOAD(4, f->middles[0] + 2 * i, 2 * MAX_HEAD_DIM);
            TILE_LOAD(6, f->columns[i], 64);
            TILE_DOT(0, 4, 6);
        }
        TILE_STORE(0, f->sums[0] + first, 4 * TILE_ROWS);
    }
}

/* Rows whose digits fill a tile: as many in each tile. */
INLINE int rows_of_tile(int rows) {
    int tiles = (rows + 7) / 8;
    return (rows + tiles - 1) / tiles;
}

/* Quads of bytes that a tile multiplies at once. */
INLINE int quads_of_tile(int bytes) { return bytes % 64 == 0 ? 16 : bytes % 32 == 0 ? 8 : 4; }

/* Multiply the digits of `rows` rows with a group's two blocks of keys: `products` [2 * rows][GROUPS * SPAN]. */
INLINE void multiply_keys(int dim, const int8_t *digits, int stride, int rows, const int8_t *codes, int32_t *products) {
    const int each = rows_of_tile(rows), step = 4 * quads_of_tile(dim);
    for (int first = 0; first < rows; first += each) {
        int row = first + each < rows ? first : rows - each; /* the last tiles may overlap */
        const int8_t *a = digits + 2 * row * stride, *b = codes;
        char *c = (char *)(products + 2 * row * PRODUCT_STRIDE);
        TILE_ZERO(0);
        TILE_ZERO(1);
        for (int i = 0; i < dim; i += step, a += step, b += 16 * step) {
            TILE_LOAD(4, a, stride);
            TILE_LOAD(6, b, 64);
            TILE_DOT_BYTES(0, 4, 6);
            TILE_LOAD(7, b + 16 * dim, 64);
            TILE_DOT_BYTES(1, 4, 7);
        }
        TILE_STORE(0, c, 4 * PRODUCT_STRIDE);
        TILE_STORE(1, c + 64, 4 * PRODUCT_STRIDE);
    }
}

/* Add sums of products of both digits, in units, to `onto`. */
INLINE vec join_digits(const int32_t *high, const int32_t *low, float unit, vec onto) {
    onto = __builtin_convertvector(*(const ints_at *)high, vec) * (256 * unit) + onto;
    return __builtin_convertvector(*(const ints_at *)low, vec) * unit + onto;
}

/* Compute the scores of the quantised groups from number `first` on, at most GROUPS of them. */
INLINE void score_groups(const struct attention *a, struct NAME(work) *w, const struct piece_blocks *found, int first,
                         int groups, int rows) {
    struct byte_work *f = &w->bytes;
    const int dim = a->head_dim, stride = (dim + 31) / 32 * 32, size = 2 * rows * stride;
    for (int g = 0; g < groups; g++)
        if (found->groups[first + g]) {
            prefetch_part(a, found, first + g, 0, 4);
            multiply_by_scales(dim, f, found->groups[first + g], rows, f->digits + g * size, stride);
        }
    for (int g = 0; g < groups; g++) {
        const char *group = found->groups[first + g];
        if (!group)
            continue;
        const int8_t *codes = (const int8_t *)key_codes(group, dim);
        prefetch_part(a, found, first + g, 1, 4);
        if (a->kv_format->bits == 4) {
            spread_codes((const char *)codes, dim / 2, f->codes + g * SPAN * dim);
            codes = f->codes + g * SPAN * dim;
        }
        TILE_FENCE();
        multiply_keys(dim, f->digits + g * size, stride, rows, codes, f->products + g * SPAN);
    }
    for (int r = 0; r < rows; r++) {
        const int32_t *high = f->products + 2 * r * PRODUCT_STRIDE;
        float *scores = w->tiles.scores + r * SCORE_STRIDE + first * SPAN, unit = f->units[r] * NAME(code_unit)(a);
        for (int i = 0; i < groups * SPAN; i += BLOCK)
            if (found->groups[first + i / SPAN])
                *(vec_at *)(scores + i) =
                    join_digits(high + i, high + PRODUCT_STRIDE + i, unit, NAME(splat)(f->sums[first + i / SPAN][r]));
    }
}

/* Compute the scores of all blocks of a piece that are not quantised. */
INLINE void score_blocks(const struct attention *a, struct NAME(work) *w, const struct piece_blocks *found, int offset,
                         int rows, int blocks) {
    for (int j = 0, end; j < blocks; j = end) {
        end = plain_end(found, j, blocks);
        struct tile_product scores =
            score_product(a, w, offset, found->keys + j, NULL, w->tiles.scores + j * BLOCK, SCORE_STRIDE);
        if (end > j)
            run_tile_product(&scores, rows, end - j);
        else
            end = j + SPAN / BLOCK;
    }
}

/* Compute the scores of a piece of which some groups have integer codes, for rows from row `offset` on. */
TARGET static void score_bytes(const struct attention *a, struct NAME(work) *w, const struct piece_blocks *found,
                               int offset, int rows, int blocks) {
    struct byte_work *f = &w->bytes;
    const uint16_t *queries = (const uint16_t *)w->queries + a->head_dim * offset;
    int dim = a->head_dim, spans = (blocks * BLOCK + SPAN - 1) / SPAN;
    score_blocks(a, w, found, offset, rows, blocks);
    collect_key_numbers(dim, f, found, spans);
    for (int r = 0; r < rows; r++)
        widen_query(dim, f, queries + r * dim, r);
    multiply_middles(dim, f, queries, rows);
    set_tile_shapes(2 * rows_of_tile(rows), quads_of_tile(dim));
    for (int span = 0; span < spans; span += GROUPS)
        score_groups(a, w, found, span, spans - span < GROUPS ? spans - span : GROUPS, rows);
}

/* Write the values of some groups from number `first` on as bytes, shortly before they are multiplied for the first time. */
INLINE void spread_values(const struct attention *a, struct byte_work *f, const struct piece_blocks *found, int spans,
                          int first) {
    const int dim = a->head_dim, end = first + GROUPS < spans ? first + GROUPS : spans;
    for (int span = first; span < end; span++)
        if (found->groups[span]) {
            prefetch_part(a, found, span, 2, 4);
            spread_codes(value_codes(a->kv_format, found->groups[span], dim), dim / 2, f->codes + span * SPAN * dim);
        }
    TILE_FENCE();
}

/* Multiply digits of rows with up to four tiles of columns of the values of all groups. */
INLINE void multiply_values(const int columns, const struct attention *a, struct byte_work *f,
                            const struct piece_blocks *found, int spans, int row, int first) {
    const int dim = a->head_dim, four = a->kv_format->bits == 4, fresh = !row && !first;
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int span = 0; span < spans; span++) {
        if (fresh && four && span % GROUPS == 0)
            spread_values(a, f, found, spans, span);
        if (!found->groups[span])
            continue;
        const char *values = four ? (const char *)f->codes + span * SPAN * dim
                                  : value_codes(a->kv_format, found->groups[span], dim);
        const char *b = values + first * SPAN * BLOCK;
        if (fresh)
            prefetch_part(a, found, span, four ? 3 : 1, four ? 4 : 2);
        TILE_LOAD(4, f->digits + 2 * row * BYTE_STRIDE + span * SPAN, BYTE_STRIDE);
        TILE_LOAD(6, b, 64);
        TILE_DOT_BYTES(0, 4, 6);
        if (columns > 1) {
            TILE_LOAD(7, b + SPAN * BLOCK, 64);
            TILE_DOT_BYTES(1, 4, 7);
        }
        if (columns > 2) {
            TILE_LOAD(6, b + 2 * SPAN * BLOCK, 64);
            TILE_DOT_BYTES(2, 4, 6);
        }
        if (columns > 3) {
            TILE_LOAD(7, b + 3 * SPAN * BLOCK, 64);
            TILE_DOT_BYTES(3, 4, 7);
        }
    }
    char *c = (char *)(f->products + 2 * row * PRODUCT_STRIDE + first * BLOCK);
    TILE_STORE(0, c, 4 * PRODUCT_STRIDE);
    if (columns > 1)
        TILE_STORE(1, c + 64, 4 * PRODUCT_STRIDE);
    if (columns > 2)
        TILE_STORE(2, c + 128, 4 * PRODUCT_STRIDE);
    if (columns > 3)
        TILE_STORE(3, c + 192, 4 * PRODUCT_STRIDE);
}

/* The same for any number of columns. */
TARGET static void multiply_all_values(const struct attention *a, struct byte_work *f, const struct piece_blocks *found,
                                       int spans, int row) {
    int first = 0, tiles = a->head_dim / BLOCK;
    for (; first + 4 <= tiles; first += 4)
        multiply_values(4, a, f, found, spans, row, first);
    switch (tiles - first) {
        case 1: multiply_values(1, a, f, found, spans, row, first); break;
        case 2: multiply_values(2, a, f, found, spans, row, first); break;
        case 3: multiply_values(3, a, f, found, spans, row, first); break;
    }
}

/* Add the values of the blocks that are not quantised. */
INLINE void add_blocks(const struct attention *a, struct NAME(work) *w, const struct piece_blocks *found, int rows,
                       int blocks, float *out) {
    for (int j = 0, end; j < blocks; j = end) {
        end = plain_end(found, j, blocks);
        struct tile_product output =
            output_product(a->head_dim, w->tiles.weights + j * BLOCK, found->values + j, NULL, end - j, out);
        output.onto = 1;
        if (end > j)
            run_tile_product(&output, rows, a->head_dim / BLOCK);
        else
            end = j + SPAN / BLOCK;
    }
}

/* Compute the output of such a piece from the digits of the numerators, multiplied by the values' scales. */
TARGET static void output_bytes(const struct attention *a, struct NAME(work) *w, const struct piece_blocks *found,
                                const float *middles, int rows, int blocks, float *out) {
    struct byte_work *f = &w->bytes;
    int dim = a->head_dim, spans = (blocks * BLOCK + SPAN - 1) / SPAN, each = rows_of_tile(rows);
    const float unit = w->scales.unit * NAME(code_unit)(a);
    TILE_FENCE();
    set_tile_shapes(2 * each, SPAN / 4);
    for (int first = 0; first < rows; first += each)
        multiply_all_values(a, f, found, spans, first + each < rows ? first : rows - each);
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < dim; d += BLOCK) {
            const int32_t *high = f->products + 2 * r * PRODUCT_STRIDE + d;
            *(vec_at *)(out + r * dim + d) = join_digits(high, high + PRODUCT_STRIDE, unit, NAME(splat)(middles[r]));
        }
    add_blocks(a, w, found, rows, blocks, out);
}
