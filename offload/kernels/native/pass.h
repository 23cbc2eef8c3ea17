/* Forward passes whose calls were recorded: one call from Python runs many, and nothing is computed in between. */

static int run_call(const struct level *level, const struct call *c, const struct pass *p) {
    switch (c->kind) {
        case APPEND: {
            struct append *a = c->arguments;
            a->start = p->start, a->stored = p->stored, a->cos = p->cos, a->sin = p->sin;
            return run_rows(append_tokens, a, a->tokens);
        }
        case ATTEND: {
            struct attention *a = c->arguments;
            a->seen = p->seen, a->parents = p->parents, a->nodes = p->nodes;
            return level->attend(a);
        }
        case LINEAR: return level->linear(c->arguments);
        case NORM: return level->norm(c->arguments);
        case GATE: return level->gate(c->arguments);
        case COPY: {
            const struct copy *copy = c->arguments;
            memcpy(copy->to, copy->from, copy->bytes);
            return 0;
        }
    }
    return 2;
}

/* Run calls in order until one fails. */
int triforce_run(const struct level *level, const struct pass *p) {
    for (int64_t i = 0; i < p->count; i++) {
        int failed = run_call(level, p->calls + i, p);
        if (failed)
            return failed;
    }
    return 0;
}
