/* The part of attention to a tree that its rows do not share, by AMX; see tree.h. Included by attend_amx.h. */
/* Compute the scores of `rows` rows against everything stored from the tree's base on. */
TARGET static void score_tree_by_tiles(const struct attention *a, struct NAME(work) *w, int head, int offset, int rows) {
    struct NAME(tree) *t = &w->tree;
    const char *keys[PIECE / BLOCK];
    NAME(unpack_base)(a, t, head);
    for (int64_t at = 0; at < t->stride; at += PIECE) {
        int blocks = (int)((t->stride - at < PIECE ? t->stride - at : PIECE) / BLOCK);
        for (int j = 0; j < blocks; j++)
            keys[j] = NAME(tree_block)(a, t, head, at / BLOCK + j);
        struct tile_product scores = score_product(a, w, offset, keys, keys, t->scores + at, t->stride);
        run_tile_product(&scores, rows, blocks);
    }
}

/* Set the scores of the keys `shared` to `end - 1` of each row's path, in a piece that begins at `start`. */
TARGET static void score_paths_by_tiles(const struct attention *a, struct NAME(work) *w, int head, int64_t first, int offset,
                                   int rows, int64_t start, int64_t shared, int64_t end) {
    score_tree_by_tiles(a, w, head, offset, rows);
    for (int row = 0, same; row < rows; row += same) {
        int64_t at = first + offset + row, seen = NAME(visible_keys)(a, at);
        same = NAME(token_rows)(a, at, rows - row);
        NAME(follow_path)(a, &w->tree, at / a->group);
        for (int r = row; r < row + same; r++)
            NAME(pick_scores)(&w->tree, r, shared, seen < end ? seen : end,
                              w->tiles.scores + r * SCORE_STRIDE + (shared - start));
    }
}

/* Add the values of the keys `shared` to `end - 1` of each row's path to `out` [rows][head_dim]. */
TARGET static void add_paths_by_tiles(const struct attention *a, struct NAME(work) *w, int head, int64_t first, int rows,
                                 int64_t start, int64_t shared, int64_t end, float *out) {
    int64_t half = (int64_t)2 * BLOCK * a->head_dim;
    w->tree.copies = 0;
    for (int row = 0, same; row < rows; row += same) {
        int64_t seen = NAME(visible_keys)(a, first + row), last = seen < end ? seen : end;
        same = NAME(token_rows)(a, first + row, rows - row);
        if (last <= shared)
            continue;
        NAME(follow_path)(a, &w->tree, (first + row) / a->group);
        NAME(copy_values)(a, &w->tree, head, shared, last);
        const char *values[PIECE / BLOCK];
        int blocks = (int)((last - shared + BLOCK - 1) / BLOCK);
        for (int j = 0; j < blocks; j++)
            values[j] = w->tree.values + j * half;
        struct tile_product output =
            output_product(a->head_dim, w->tiles.weights + row * WEIGHT_STRIDE + (shared - start), values, values,
                           blocks, out + row * a->head_dim);
        output.onto = 1;
        run_tile_product(&output, same, a->head_dim / 16);
    }
}
