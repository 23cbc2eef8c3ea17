/*
 * Attention over one piece by AMX, for bf16; included by attend.h for the level that has it.
 *
 * All scores of a piece are computed before its softmax, so that the output needs no rescaling and stays in tile
 * registers. The piece stays in the second-level cache meanwhile: while keys are read, the values beside them are
 * prefetched, and while values are read, the keys of the next piece.
 */
/* Products of some rows with up to four tiles of columns (two, if there are more than 16 rows). */
struct tile_product {
    const char *a; /* the rows */
    int64_t a_stride, a_step;
    const char *const *b; /* the columns' memory: at b[step * b_by_step + column * b_by_column] */
    const char *const *next; /* what to prefetch meanwhile, by the same rule, or NULL */
    int64_t b_by_step, b_by_column, step_bytes, column_bytes, b_stride;
    int steps, pairs; /* pairs of a step: of dimensions, or of tokens */
    float *c;
    int64_t c_stride; /* floats */
    int onto;         /* add to `c` */
    int inside;       /* sums of one group of columns stay in registers: AFTER_SOME, BEFORE_MORE or both */
};

enum { AFTER_SOME = 1, BEFORE_MORE = 2 };

INLINE int64_t tile_offset(const struct tile_product *t, int step, int column) {
    return step * t->step_bytes + column * t->column_bytes;
}

INLINE const char *tile_columns(const struct tile_product *t, int step, int column) {
    if (t->next) {
        const char *next = t->next[step * t->b_by_step + column * t->b_by_column] + tile_offset(t, step, column);
        for (int i = 0; i < t->pairs; i++)
            __builtin_prefetch(next + i * t->b_stride, 0, 2);
    }
    return t->b[step * t->b_by_step + column * t->b_by_column] + tile_offset(t, step, column);
}

/* Load the sums of `run_columns` from where it stores them. */
INLINE void load_sums(const int two, const int columns, const char *c, const char *below, int64_t c_stride) {
    TILE_LOAD(0, c, c_stride);
    if (columns > 1)
        TILE_LOAD(1, c + 64, c_stride);
    if (two)
        TILE_LOAD(2, below, c_stride);
    if (two && columns > 1)
        TILE_LOAD(3, below + 64, c_stride);
    if (columns > 2)
        TILE_LOAD(2, c + 128, c_stride);
    if (columns > 3)
        TILE_LOAD(3, c + 192, c_stride);
}

/* Compute columns `first` to `first + columns - 1`, 16 to a column tile. */
INLINE void run_columns(const struct tile_product *t, const int two, const int columns, int first) {
    int64_t a_stride = t->a_stride, b_stride = t->b_stride, c_stride = 4 * t->c_stride;
    char *c = (char *)(t->c + 16 * first), *below = c + 16 * c_stride;
    if (!(t->inside & AFTER_SOME)) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    if (t->onto)
        load_sums(two, columns, c, below, c_stride);
    for (int step = 0; step < t->steps; step++) {
        const char *a = t->a + step * t->a_step;
        TILE_LOAD(4, a, a_stride);
        if (two)
            TILE_LOAD(5, a + 16 * a_stride, a_stride);
        TILE_LOAD(6, tile_columns(t, step, first), b_stride);
        TILE_DOT(0, 4, 6);
        if (two)
            TILE_DOT(2, 5, 6);
        if (columns > 1) {
            TILE_LOAD(7, tile_columns(t, step, first + 1), b_stride);
            TILE_DOT(1, 4, 7);
            if (two)
                TILE_DOT(3, 5, 7);
        }
        if (columns > 2) {
            TILE_LOAD(6, tile_columns(t, step, first + 2), b_stride);
            TILE_DOT(2, 4, 6);
        }
        if (columns > 3) {
            TILE_LOAD(7, tile_columns(t, step, first + 3), b_stride);
            TILE_DOT(3, 4, 7);
        }
    }
    if (t->inside & BEFORE_MORE)
        return;
    TILE_STORE(0, c, c_stride);
    if (columns > 1)
        TILE_STORE(1, c + 64, c_stride);
    if (two)
        TILE_STORE(2, below, c_stride);
    if (two && columns > 1)
        TILE_STORE(3, below + 64, c_stride);
    if (columns > 2)
        TILE_STORE(2, c + 128, c_stride);
    if (columns > 3)
        TILE_STORE(3, c + 192, c_stride);
}

/* Compute `columns` tiles of columns, as many as fit the registers; the shapes of the tiles are set. */
TARGET static void run_some(const struct tile_product *t, int two, int columns, int first) {
    switch (two * 4 + columns) {
        case 1: run_columns(t, 0, 1, first); break;
        case 2: run_columns(t, 0, 2, first); break;
        case 3: run_columns(t, 0, 3, first); break;
        case 4: run_columns(t, 0, 4, first); break;
        case 5: run_columns(t, 1, 1, first); break;
        case 6: run_columns(t, 1, 2, first); break;
    }
}

/* Compute `columns` tiles of columns for `rows` rows. */
TARGET static void run_tile_product(const struct tile_product *t, int rows, int columns) {
    int two = rows > 16, most = two ? 2 : 4;
    set_tile_shapes(rows, t->pairs);
    for (int first = 0; first < columns; first += most)
        run_some(t, two, columns - first < most ? columns - first : most, first);
}

#include "digits_amx.h"

#include "weigh_amx.h"

/* The memory of a piece's blocks, and of what is read after it. */
struct piece_blocks {
    const char *keys[PIECE / BLOCK], *values[PIECE / BLOCK], *next_values[PIECE / BLOCK], *next_keys[PIECE / BLOCK];
    const char *groups[PIECE / SPAN]; /* NULL for blocks that are not quantised */
    int quantized, plain; /* whether a group is not NULL, and whether one is */
};

/* Return the end of the blocks from `block` on that are not quantised. */
INLINE int plain_end(const struct piece_blocks *found, int block, int blocks) {
    while (block < blocks && !found->groups[block * BLOCK / SPAN])
        block++;
    return block;
}

/* Unpack the packed blocks of a piece, and point to those instead. */
TARGET static void unpack_piece(const struct attention *a, struct NAME(work) *w, int head, int64_t start, int64_t end,
                                struct piece_blocks *found) {
    const int64_t half = (int64_t)2 * BLOCK * a->head_dim;
    const int blocks = (int)((end - start + BLOCK - 1) / BLOCK);
    char *keys = w->unpacked, *values = keys + PIECE / BLOCK * half;
    for (int j = 0, done; j < blocks; j += done) {
        done = 1;
        if (!NAME(packed_at)(a, head, start / BLOCK + j).run)
            continue;
        struct NAME(packed_span) next = NAME(packed_at)(a, head, start / BLOCK + (j + 2 < blocks ? j + 2 : j));
        done = NAME(unpack_blocks)(a, head, start / BLOCK + j, blocks - j - 1, next, keys + j * half, values + j * half);
        for (int k = j; k < j + done; k++)
            found->keys[k] = keys + k * half, found->values[k] = values + k * half;
    }
}

INLINE void find_blocks(const struct attention *a, struct NAME(work) *w, int head, int64_t start, int64_t end,
                        int64_t ahead, struct piece_blocks *found) {
    int64_t half = (int64_t)2 * BLOCK * a->head_dim;
    found->quantized = found->plain = 0;
    for (int64_t at = start; at < end; at += SPAN) {
        int packed = NAME(packed_at)(a, head, at / BLOCK).run != NULL;
        const char *group = found->groups[(at - start) / SPAN] = packed ? NULL : NAME(group_of)(a, head, at / BLOCK);
        found->quantized |= group != NULL;
        found->plain |= group == NULL;
    }
    for (int64_t at = start; at < end; at += BLOCK) {
        int64_t j = (at - start) / BLOCK, next = at + PIECE < ahead ? at + PIECE : at;
        found->keys[j] = NAME(block)(a, head, at / BLOCK);
        found->values[j] = found->next_values[j] = found->keys[j] + half;
        found->next_keys[j] = NAME(block)(a, head, next / BLOCK);
    }
    if (a->quantized && is_packed(a->kv_format))
        unpack_piece(a, w, head, start, end, found);
    for (int64_t at = end / BLOCK * BLOCK; at < end && at >= start; at += BLOCK) {
        const char **values = found->values + (at - start) / BLOCK;
        *values = NAME(pad_tail)(a, w, *values, end - at);
    }
}

/* The product of rows of queries and `blocks` blocks of keys. */
INLINE struct tile_product score_product(const struct attention *a, struct NAME(work) *w, int row,
                                         const char *const *keys, const char *const *next, float *c, int64_t c_stride) {
    int dim = a->head_dim, pairs = dim % 32 ? 8 : 16;
    return (struct tile_product){
        .a = (const char *)w->queries + 2 * dim * row, .a_stride = 2 * dim, .a_step = 4 * pairs,
        .b = keys, .next = next, .b_by_column = 1, .step_bytes = 64 * pairs, .b_stride = 64,
        .steps = dim / 2 / pairs, .pairs = pairs,
        .c = c, .c_stride = c_stride};
}

/* The product of rows of numerators and `blocks` blocks of values. */
INLINE struct tile_product output_product(int dim, const uint16_t *weights, const char *const *values,
                                          const char *const *next, int blocks, float *out) {
    return (struct tile_product){
        .a = (const char *)weights, .a_stride = 2 * WEIGHT_STRIDE, .a_step = 2 * BLOCK,
        .b = values, .next = next, .b_by_step = 1, .column_bytes = 64, .b_stride = 4 * dim,
        .steps = blocks, .pairs = BLOCK / 2,
        .c = out, .c_stride = dim};
}

/*
 * Collect the scales and middles of a piece's values; where they are not quantised, 1 and 0. Where codes are integers, the
 * scales are in units of digits, and 0 where values are not quantised.
 */
TARGET static void collect_scales(const struct attention *a, struct scales *all, const struct piece_blocks *found,
                                  int spans) {
    const int bytes = a->kv_format->bits != FLOAT8;
    vec largest = NAME(splat)(0);
    for (int i = 0; i < PIECE; i += LANES) {
        const uint16_t *scales = i < spans * SPAN ? (const uint16_t *)found->groups[i / SPAN] : NULL;
        if (scales)
            scales += 2 * a->head_dim + i % SPAN;
        vec own = scales ? NAME(load)(scales, 0, 0) : NAME(splat)(!bytes);
        *(vec_at *)(all->scales + i) = own;
        *(vec_at *)(all->middles + i) = scales ? NAME(load)(scales, SPAN, 0) : NAME(splat)(0);
        largest = NAME(max)(own, largest); /* NaN is passed over: it is in the middles too */
    }
    float inverse = 1;
    if (bytes)
        all->unit = NAME(unit_of)(NAME(largest_lane)(largest), &inverse);
    for (int i = 0; bytes && i < PIECE; i += LANES)
        *(vec_at *)(all->scales + i) *= inverse;
}

/* Prefetch one of `parts` parts of the group that is read a piece after that of a span. */
INLINE void prefetch_part(const struct attention *a, const struct piece_blocks *found, int span, int part, int parts) {
    int64_t bytes = kv_group_bytes(a->kv_format, a->head_dim), end = (part + 1) * bytes / parts;
    for (int64_t i = part * bytes / parts; i < end; i += 64)
        __builtin_prefetch(found->next_keys[span * (SPAN / BLOCK)] + i, 0, 2);
}

/* Compute the scores of a piece of which some groups are quantised, for rows from row `offset` of the group on. */
TARGET static void score_quantized(const struct attention *a, struct NAME(work) *w, const struct piece_blocks *found,
                                   int offset, int rows, int blocks) {
    struct NAME(dequantized) *q = &w->dequantized;
    int64_t half = (int64_t)2 * BLOCK * a->head_dim;
    const float *queries = (const float *)((const uint16_t *)w->queries + a->head_dim * offset);
    const char *keys[] = {q->keys, q->keys + half};
    struct tile_product scores = score_product(a, w, offset, keys, NULL, NULL, SCORE_STRIDE);
    const char *own = scores.a;
    float sums[TILE_ROWS][PIECE / SPAN]; /* of each row's products with the middles */
    set_tile_shapes(rows, scores.pairs);
    for (int j = 0; j < blocks; j += SPAN / BLOCK) {
        const char *group = found->groups[j * BLOCK / SPAN];
        scores.c = w->tiles.scores + j * BLOCK;
        scores.a = group ? (const char *)q->queries : own;
        scores.b = group ? keys : found->keys + j;
        if (group) {
            prefetch_part(a, found, j * BLOCK / SPAN, 0, 2);
            NAME(unpack_keys)(a, group, q->keys);
            NAME(scale_queries)(a, q, group, queries, rows);
        }
        TILE_FENCE();
        run_some(&scores, rows > 16, blocks - j < SPAN / BLOCK ? blocks - j : SPAN / BLOCK, 0);
        for (int r = 0; r < rows; r++)
            sums[r][j * BLOCK / SPAN] = group ? q->sums[r] : 0;
    }
    for (int r = 0; r < rows; r++) /* now that all tiles are in memory */
        for (int j = 0; j < blocks; j++)
            NAME(add_to_row)(w->tiles.scores + r * SCORE_STRIDE + j * BLOCK, sums[r][j * BLOCK / SPAN], BLOCK);
}

/* Compute the output of such a piece, whose numerators are multiplied by the values' scales. */
TARGET static void output_quantized(const struct attention *a, struct NAME(work) *w, const struct piece_blocks *found,
                                    int rows, int blocks, float *out) {
    struct NAME(dequantized) *q = &w->dequantized;
    int dim = a->head_dim, two = rows > 16, most = two ? 2 : 4;
    const char *values[] = {q->values, q->values + (int64_t)2 * BLOCK * dim};
    struct tile_product output = output_product(dim, NULL, values, NULL, 0, out);
    set_tile_shapes(rows, output.pairs);
    for (int first = 0; first < dim / 16; first += most)
        for (int j = 0; j < blocks; j += SPAN / BLOCK) {
            const char *group = found->groups[j * BLOCK / SPAN];
            int more = blocks - j > SPAN / BLOCK;
            output.a = (const char *)(w->tiles.weights + j * BLOCK);
            output.b = group ? values : found->values + j;
            output.steps = more ? SPAN / BLOCK : blocks - j;
            output.inside = (j > 0 ? AFTER_SOME : 0) | (more ? BEFORE_MORE : 0);
            if (group && !first)
                prefetch_part(a, found, j * BLOCK / SPAN, 1, 2);
            if (group)
                NAME(unpack_values)(a, group, q->values);
            TILE_FENCE();
            run_some(&output, two, dim / 16 - first < most ? dim / 16 - first : most, first);
        }
}

#include "quantized_kv_amx.h"

#include "tree_amx.h"

/*
 * Compute the partial result of up to TILE_ROWS rows, from row `offset` of the group on, over the keys `start` to
 * `end - 1`, of which all rows read those before `shared` together.
 */
TARGET static void attend_rows_amx(const struct attention *a, struct NAME(work) *w, int head,
                                   const struct piece_blocks *found, int64_t first, int offset, int rows, int64_t start,
                                   int64_t shared, int64_t end, struct NAME(partial) p) {
    struct tile_work *tiles = &w->tiles;
    int dim = a->head_dim, blocks = (shared - start + BLOCK - 1) / BLOCK;
    int columns = (end - start + BLOCK - 1) / BLOCK * BLOCK;
    const int bytes = found->quantized && a->kv_format->bits != FLOAT8; /* codes are integers */
    float middles[TILE_ROWS];
    if (bytes)
        score_bytes(a, w, found, offset, rows, blocks);
    else if (found->quantized)
        score_quantized(a, w, found, offset, rows, blocks);
    else {
        struct tile_product scores =
            score_product(a, w, offset, found->keys, found->next_values, tiles->scores, SCORE_STRIDE);
        run_tile_product(&scores, rows, blocks);
    }
    if (shared < end)
        score_paths_by_tiles(a, w, head, first, offset, rows, start, shared, end);
    for (int r = 0; r < rows; r++) {
        int64_t seen = NAME(visible_keys)(a, first + offset + r), limit = seen < end ? seen - start : end - start;
        float *scores = tiles->scores + r * SCORE_STRIDE, factor = a->scale * 1.44269504f;
        uint16_t *weights = tiles->weights + r * WEIGHT_STRIDE;
        int visible = limit < 0 ? 0 : (int)limit;
        int64_t hidden = NAME(hidden_keys)(a, first + offset + r) - start;
        if (hidden >= visible)
            hidden = visible = 0;
        for (int i = 0; i < hidden; i++)
            scores[i] = -INFINITY;
        if (bytes) {
            struct numerators to = {weights, w->bytes.digits + 2 * r * BYTE_STRIDE, columns,
                                    found->plain || shared < end};
            middles[r] = weigh_bytes(scores, &to, visible, factor, p.maximum + offset + r, p.sum + offset + r, &w->scales);
        }
        else if (found->quantized)
            middles[r] = weigh_quantized(scores, weights, visible, columns, factor, p.maximum + offset + r,
                                         p.sum + offset + r, &w->scales);
        else
            weigh_row(scores, weights, visible, columns, factor, p.maximum + offset + r, p.sum + offset + r);
        for (int i = 0; i < hidden; i++)
            weights[i] = 0;
    }
    if (bytes)
        output_bytes(a, w, found, middles, rows, blocks, p.out + dim * offset);
    else if (found->quantized) {
        output_quantized(a, w, found, rows, blocks, p.out + dim * offset);
        for (int r = 0; r < rows; r++)
            NAME(add_to_row)(p.out + dim * (offset + r), middles[r], dim);
    } else {
        struct tile_product output =
            output_product(dim, tiles->weights, found->values, found->next_keys, blocks, p.out + dim * offset);
        run_tile_product(&output, rows, dim / 16);
    }
    if (shared < end)
        add_paths_by_tiles(a, w, head, first + offset, rows, start, shared, end, p.out + dim * offset);
}

TARGET static void attend_piece_amx(const struct attention *a, struct NAME(work) *w, int head, int64_t first, int rows,
                                   int64_t start, int64_t end, int64_t ahead, struct NAME(partial) p) {
    struct piece_blocks found;
    end = end > start ? end : start; /* where no row of the group sees the piece */
    int64_t shared = NAME(shared_end)(a, start, end);
    find_blocks(a, w, head, start, shared, ahead, &found);
    if (found.quantized)
        collect_scales(a, &w->scales, &found, (shared - start + SPAN - 1) / SPAN);
    for (int offset = 0; offset < rows; offset += TILE_ROWS)
        attend_rows_amx(a, w, head, &found, first, offset, rows - offset < TILE_ROWS ? rows - offset : TILE_ROWS,
                        start, shared, end, p);
    TILE_RELEASE();
}

/* Compute the scores of up to TILE_ROWS rows, from row `row` of the group on, against the keys `start` to `end - 1`. */
TARGET static void score_keys_by_tiles(const struct attention *a, struct NAME(work) *w, int head, int row, int rows,
                                       int64_t start, int64_t end) {
    const char *keys[OBSERVED_KEYS / BLOCK];
    int blocks = (int)((end - start + BLOCK - 1) / BLOCK);
    for (int j = 0; j < blocks; j++)
        keys[j] = NAME(readable_keys)(a, head, start / BLOCK + j, w->unpacked + 2 * j * BLOCK * a->head_dim);
    struct tile_product scores = score_product(a, w, row, keys, NULL, w->tiles.scores, SCORE_STRIDE);
    run_tile_product(&scores, rows, blocks);
    TILE_RELEASE();
}
