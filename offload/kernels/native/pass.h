/*
 * Forward passes whose calls were recorded: one call from Python runs many, and nothing is computed in between.
 *
 * They were recorded for the first rows of the pass, and any number of them.
 */

static const void *shifted(const void *x, const struct append *a, const struct sequence *s, int64_t stride) {
    return (const char *)x + s->first * stride * (a->wide ? 4 : 2);
}

static int append_sequence(const struct append *recorded, const struct sequence *s) {
    struct append a = *recorded;
    a.q = shifted(a.q, &a, s, a.q_stride), a.k = shifted(a.k, &a, s, a.k_stride), a.v = shifted(a.v, &a, s, a.v_stride);
    a.start = s->start, a.tokens = s->tokens, a.stored = s->stored, a.cos = s->cos, a.sin = s->sin;
    return run_rows(append_tokens, &a, a.tokens);
}

static int copy_sequence(const struct copy *c, const struct sequence *s) {
    memcpy((char *)c->to + (c->joins ? s->first * c->row_bytes : 0), c->from, s->tokens * c->row_bytes);
    return 0;
}

/* Run calls `from` to `to` - 1 of a layer of a sequence, none of which attends. */
static int run_layer_calls(const struct sequence *s, int64_t layer, int64_t from, int64_t to) {
    const struct call *calls = s->layers[layer].calls;
    for (int64_t i = from; i < to; i++) {
        int failed = calls[i].kind == APPEND ? append_sequence(calls[i].arguments, s)
                                             : copy_sequence(calls[i].arguments, s);
        if (failed)
            return failed;
    }
    return 0;
}

/* Return the index of the call of a layer of a sequence that attends. */
static int64_t attending(const struct sequence *s, int64_t layer) {
    int64_t i = 0;
    while (s->layers[layer].calls[i].kind != ATTEND)
        i++;
    return i;
}

/* The attentions of up to MOST_JOINT sequences are divided among the threads together. */
static int attend_sequences(const struct level *level, const struct sequence *sequences, int count, int64_t layer) {
    struct attention some[MOST_JOINT];
    const struct attention *calls[MOST_JOINT];
    for (int i = 0; i < count; i++) {
        const struct sequence *s = sequences + i;
        some[i] = *(const struct attention *)s->layers[layer].calls[attending(s, layer)].arguments;
        some[i].tokens = s->tokens, some[i].seen = s->seen, some[i].parents = s->parents, some[i].nodes = s->nodes;
        calls[i] = some + i;
    }
    return count == 1 ? level->attend(calls[0]) : level->attend_all(calls, count);
}

static int run_layer(const struct level *level, const struct pass *p, int64_t layer) {
    int failed = 0, count = p->sequence_count;
    const struct sequence *s = p->sequences;
    for (int i = 0; i < count && !failed; i++)
        failed = run_layer_calls(s + i, layer, 0, attending(s + i, layer));
    for (int i = 0; i < count && !failed; i += MOST_JOINT)
        failed = attend_sequences(level, s + i, count - i < MOST_JOINT ? count - i : MOST_JOINT, layer);
    for (int i = 0; i < count && !failed; i++)
        failed = run_layer_calls(s + i, layer, attending(s + i, layer) + 1, s[i].layers[layer].count);
    return failed;
}

static int run_linear(const struct level *level, const struct linear *recorded, int64_t rows) {
    struct linear l = *recorded;
    l.rows = rows;
    return level->linear(&l);
}

static int run_norm(int (*run)(const struct norm *), const struct norm *recorded, int64_t rows) {
    struct norm n = *recorded;
    n.rows = rows * n.heads;
    return run(&n);
}

static void copy_rows(const struct copy *c, int64_t rows) { memcpy(c->to, c->from, rows * c->row_bytes); }

static int run_unpack(const struct unpack *recorded, int64_t rows) {
    struct unpack u = *recorded;
    u.rows = rows;
    return run_rows(unpack_rows, &u, rows);
}

/* Run calls in order until one fails. */
int triforce_run(const struct level *level, const struct pass *p) {
    int failed = 0;
    for (const struct call *c = p->calls; c < p->calls + p->count && !failed; c++)
        switch (c->kind) {
            case LINEAR: failed = run_linear(level, c->arguments, p->rows); break;
            case NORM: failed = run_norm(level->norm, c->arguments, p->rows); break;
            case GATE: failed = run_norm(level->gate, c->arguments, p->rows); break;
            case UNPACK: failed = run_unpack(c->arguments, p->rows); break;
            case COPY: copy_rows(c->arguments, p->rows); break;
            case LAYER: failed = run_layer(level, p, c->layer); break;
            default: failed = 2;
        }
    return failed;
}
