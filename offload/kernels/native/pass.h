/* Whole layers of a pass of a few tokens by one call: from Python, each of its calls would take longer than the norms. */
struct layer_rows { /* what the linears and norms of a layer write, [rows][width] each */
    char *normed, *qkv, *q, *k, *attended, *both, *gated;
};

/* Lay out the rows of all layers in this thread's memory. Returns 0 if there is none. */
static int place_rows(const struct pass *p, struct layer_rows *r) {
    const struct layer *l = p->layers;
    const int64_t item = p->wide ? 4 : 2, own = p->rows * item, q = p->heads * p->head_dim, kv = p->kv_heads * p->head_dim;
    int64_t gate_up = 0;
    for (int i = p->first; i < p->last; i++)
        gate_up = l[i].gate_up.outputs > gate_up ? l[i].gate_up.outputs : gate_up;
    const int64_t sizes[] = {l->input_norm.width, q + 2 * kv, q, kv, q, gate_up, gate_up / 2};
    char **rows[] = {&r->normed, &r->qkv, &r->q, &r->k, &r->attended, &r->both, &r->gated};
    int64_t total = 0;
    for (int i = 0; i < 7; i++)
        total += sizes[i];
    char *at = scratch(&row_memory, own * total);
    for (int i = 0; at && i < 7; at += own * sizes[i++])
        *rows[i] = at;
    return at != NULL;
}

static int norm_rows_of(const struct level *level, const struct norm *norm, const void *x, void *y, int64_t rows) {
    struct norm n = *norm;
    n.x = x, n.y = y, n.rows = rows * n.heads;
    return level->run[NORM](&n);
}

/* Store the keys and values of one sequence in layer number `layer`, and attend to them. */
static int attend_sequence(const struct level *level, const struct pass *p, const struct sequence *s, int layer,
                           const struct layer_rows *r) {
    const int64_t item = p->wide ? 4 : 2, dim = p->head_dim, q = p->heads * dim, kv = p->kv_heads * dim;
    const int64_t width = q + 2 * kv, first = s->first, normed = p->layers[layer].q_norm.width;
    char *blocks = s->kv + layer * s->layer_stride;
    struct append a = {.q = normed ? r->q + first * q * item : r->qkv + first * width * item,
                       .k = normed ? r->k + first * kv * item : r->qkv + (first * width + q) * item,
                       .v = r->qkv + (first * width + q + kv) * item, .cos = s->cos, .sin = s->sin,
                       .rotated = (char *)s->rotated + layer * s->queries * q * item, .kv = blocks, .table = s->places,
                       .q_stride = normed ? q : width, .k_stride = normed ? kv : width, .v_stride = width,
                       .head_stride = s->head_stride, .start = s->start, .tokens = s->tokens, .stored = s->stored, .heads = p->heads,
                       .kv_heads = p->kv_heads, .head_dim = dim, .wide = p->wide};
    struct attention b = {.q = a.rotated, .kv = blocks, .table = s->table ? s->table + layer * s->table_layer : NULL,
                          .table_stride = s->table_stride, .out = r->attended + first * q * item,
                          .head_stride = s->head_stride, .seen = s->seen, .causal = 1, .tokens = s->tokens,
                          .kv_heads = p->kv_heads, .group = p->heads / p->kv_heads, .head_dim = dim, .wide = p->wide,
                          .narrow_out = !p->wide, .scale = p->scale, .parents = s->parents, .nodes = s->nodes};
    return append(&a) || level->run[ATTEND](&b);
}

/* Run the rows of all sequences through one layer. */
static int run_layer(const struct level *level, const struct pass *p, int layer, const struct layer_rows *r) {
    const struct layer *l = p->layers + layer;
    const int64_t item = p->wide ? 4 : 2, rows = p->rows, q = p->heads * p->head_dim, width = l->gate_up.outputs / 2;
    struct norm gate = {.x = r->both, .y = r->gated, .rows = rows, .width = width, .heads = 1, .stride = width, .wide = p->wide};
    if (norm_rows_of(level, &l->input_norm, p->x, r->normed, rows) ||
        triforce_linears(level, &l->qkv, r->normed, r->qkv, rows, l->qkv.outputs, 0, p->wide))
        return 1;
    if (l->q_norm.width && (norm_rows_of(level, &l->q_norm, r->qkv, r->q, rows) ||
                            norm_rows_of(level, &l->k_norm, r->qkv + q * item, r->k, rows)))
        return 1;
    for (int i = 0; i < p->count; i++) {
        int failed = attend_sequence(level, p, p->sequences + i, layer, r);
        if (failed)
            return failed;
    }
    return triforce_linears(level, &l->o, r->attended, p->x, rows, l->o.outputs, 1, p->wide) ||
           norm_rows_of(level, &l->mlp_norm, p->x, r->normed, rows) ||
           triforce_linears(level, &l->gate_up, r->normed, r->both, rows, 2 * width, 0, p->wide) || level->run[NORM](&gate) ||
           triforce_linears(level, &l->down, r->gated, p->x, rows, l->down.outputs, 1, p->wide);
}

static int run_pass(const struct level *level, const struct pass *p) {
    struct layer_rows r;
    int failed = !place_rows(p, &r);
    for (int layer = p->first; layer < p->last && !failed; layer++)
        failed = run_layer(level, p, layer, &r);
    return failed;
}
