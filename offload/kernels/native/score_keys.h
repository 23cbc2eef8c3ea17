/*
 * The products of a query and many keys, head by head: scores without softmax, by which chunks of keys are selected.
 *
 * Included once per level, after attend.h. A key's sum is made in the order of attention's scores.
 */
struct NAME(scored) {
    const struct key_scores *k;
    int64_t parts; /* of a head's keys */
};

/* Score the keys `start` to `end - 1` of a head; `start` is a multiple of BLOCK. */
NOINLINE static void NAME(score_piece)(const struct key_scores *k, int64_t head, int64_t start, int64_t end) {
    int64_t bytes = (int64_t)BLOCK * k->head_dim * (k->wide ? 4 : 2);
    const char *keys = k->keys + head * k->head_stride + start / BLOCK * bytes, *next;
    struct NAME(tile) t = {.b = &keys, .next = &next, .segments = 1, .pairs = k->head_dim / 2, .fresh = 1};
    t.b_step = k->wide ? 8 * BLOCK : 4 * BLOCK;
    float query[MAX_HEAD_DIM], sums[BLOCK];
    NAME(load_query)(k->query, head * k->head_dim, k->head_dim, k->wide, query);
    for (; start < end; start += BLOCK, keys += bytes) {
        next = keys + SCORED_AHEAD;
        NAME(run_tiles)(1, 1, k->wide, t, (const char *)query, sums);
        memcpy(k->scores + head * k->stride + start, sums, 4 * (end - start < BLOCK ? end - start : BLOCK));
    }
}

TARGET static int NAME(score_pieces)(const void *context, int64_t first, int64_t last) {
    const struct NAME(scored) *s = context;
    for (int64_t i = first; i < last; i++) {
        int64_t start = i % s->parts * PIECE, end = s->k->count - start < PIECE ? s->k->count : start + PIECE;
        NAME(score_piece)(s->k, i / s->parts, start, end);
    }
    return 0;
}

TARGET static int NAME(score_keys)(const void *call) {
    const struct key_scores *k = call;
    struct NAME(scored) s = {k, (k->count + PIECE - 1) / PIECE};
    return pool_run(NAME(score_pieces), &s, s.parts * k->heads);
}
