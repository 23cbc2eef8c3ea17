/*
 * A distribution of logits, and a token of it: temperature, top-k, top-p, min-p and softmax. speculation/sampling has the
 * definitions, and does the same by torch.
 */

/* Restore the order of a heap, the least first, below an element that may be out of order. */
static void sift(float *heap, int64_t count, int64_t at) {
    float moved = heap[at];
    for (int64_t child; (child = 2 * at + 1) < count; at = child) {
        child += child + 1 < count && heap[child + 1] < heap[child];
        if (!(heap[child] < moved))
            break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

static void order(float *heap, int64_t count) {
    for (int64_t i = count / 2 - 1; i >= 0; i--)
        sift(heap, count, i);
}

/* Rule out the logits below the k-th largest. */
static void keep_top_k(float *x, int64_t vocab, int64_t k, float *heap) {
    memcpy(heap, x, 4 * k);
    order(heap, k);
    for (int64_t i = k; i < vocab; i++)
        if (x[i] > heap[0])
            heap[0] = x[i], sift(heap, k, 0);
    for (int64_t i = 0; i < vocab; i++)
        x[i] = x[i] < heap[0] ? -INFINITY : x[i];
}

/* Leave those of the tokens `ids` whose likelier ones weigh less than `mass`; return how many. */
static int64_t keep_top_p(const float *y, int32_t *ids, int64_t count, double mass, float *heap) {
    for (int64_t i = 0; i < count; i++)
        heap[i] = -y[ids[i]];
    order(heap, count);
    float least = INFINITY;
    int64_t ties = 0, others = 0, kept = 0; /* tokens that weigh `least`: those that are kept, and those that are not */
    double above = 0;
    for (int64_t left = count; left && above < mass; left--) {
        ties = -heap[0] == least ? ties + 1 : 1;
        above += least = -heap[0];
        heap[0] = heap[left - 1], sift(heap, left - 1, 0);
    }
    for (int64_t i = 0; i < count; i++)
        others += y[ids[i]] == least;
    others -= ties; /* of equally likely tokens, those with larger ids are kept */
    for (int64_t i = 0; i < count; i++)
        if (y[ids[i]] > least || (y[ids[i]] == least && others-- <= 0))
            ids[kept++] = ids[i];
    return kept;
}

static double sum_of(const float *y, const int32_t *ids, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += y[ids[i]];
    return sum;
}

/* Write the distribution over some tokens, from their weights, which may lie in its place. */
static void write_probs(float *probs, const float *y, const int32_t *ids, int64_t count, int64_t vocab, float *weights) {
    const double sum = sum_of(y, ids, count);
    for (int64_t i = 0; i < count; i++)
        weights[i] = y[ids[i]] / sum;
    memset(probs, 0, 4 * vocab);
    for (int64_t i = 0; i < count; i++)
        probs[ids[i]] = weights[i];
}

/* Return the first of some tokens at which the sum of the weights is above `chance` of all. */
static int64_t draw(const float *y, const int32_t *ids, int64_t count, double chance) {
    const double most = chance * sum_of(y, ids, count);
    double sum = 0;
    int64_t i = 0;
    while ((sum += y[ids[i]]) <= most && i < count - 1)
        i++;
    return ids[i];
}

/*
 * Return the token; NO_TOKEN where none is wanted, or as triforce_pick returns -1; NO_NUMBERS if a logit is NaN or infinity,
 * or none is finite, and then the distribution is NaN.
 */
int64_t triforce_choose(const struct level *level, const struct choice *c) {
    const int64_t vocab = c->vocab;
    const int has_top_k = c->kind != GREEDY && c->top_k && c->top_k < vocab;
    float *own = scratch(&own_memory, 12 * vocab), *heap = own + vocab, *y = c->probs ? c->probs : own;
    int32_t *ids = (int32_t *)(heap + vocab);
    const float *x = c->logits;
    if (!own)
        return NO_MEMORY;
    if (c->penalties || has_top_k)
        x = memcpy(own, x, 4 * vocab);
    if (c->penalties)
        penalise(c->penalties, own, ids, vocab);
    const float best = level->largest(x, vocab);
    if (!(best - best == 0)) {
        for (int64_t i = 0; c->probs && i < vocab; i++)
            c->probs[i] = NAN;
        return NO_NUMBERS;
    }
    if (c->kind == GREEDY) {
        level->collect(x, vocab, nextafterf(best, -INFINITY), ids);
        if (c->probs) {
            memset(c->probs, 0, 4 * vocab);
            c->probs[ids[0]] = 1;
        }
        return ids[0]; /* of equal ones the first */
    }
    if (has_top_k)
        keep_top_k(own, vocab, c->top_k, heap);
    const double sum = level->exponentials(x, y, vocab, best, 1.4426950408889634 / c->temperature);
    /* All tokens that weigh no more than this weigh at most 1 - p together, so that top-p keeps none of them. */
    double least = c->top_p < 1 ? (1 - c->top_p) * sum / vocab : 0;
    least = fmin(fmax(least, c->min_p > 0 ? nextafterf(c->min_p, 0) : 0), nextafterf(1, 0)); /* the best weighs 1 */
    const double mass = c->top_p * sum;
    float bound = c->top_p < 1 ? 0x1p-4f : 0; /* few weigh as much as tokens that top-p keeps: those alone are ordered */
    int64_t count = 0;
    for (; bound > least; bound *= 0x1p-4f)
        if (sum_of(y, ids, count = level->collect(y, vocab, bound, ids)) >= mass)
            break;
    if (!(bound > least))
        count = level->collect(y, vocab, least, ids);
    if (c->top_p < 1)
        count = keep_top_p(y, ids, count, mass, heap);
    if (c->probs)
        write_probs(c->probs, y, ids, count, vocab, heap);
    switch (c->kind) {
        case DRAWN: return draw(y, ids, count, c->chance);
        case COUPLED: return triforce_pick(c->probs, vocab, c->seed, c->position);
        default: return NO_TOKEN;
    }
}
