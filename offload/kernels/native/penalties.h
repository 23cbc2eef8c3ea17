/* Penalties of logits by earlier tokens: speculation/sampling/penalties.py, which has the definitions. */

/* Write for each token that has followed earlier occurrences of the last ones how many those are, up to `most`. */
static void find_repeats(const int32_t *tokens, int64_t count, int64_t most, int32_t *longest) {
    const int32_t last = tokens[count - 1];
    for (int64_t end = 1; end < count; end++)
        if (tokens[end - 1] == last)
            longest[tokens[end]] = 0;
    for (int64_t end = 1; end < count; end++)
        if (tokens[end - 1] == last) {
            int64_t n = 0;
            while (n < most && n < end && tokens[end - 1 - n] == tokens[count - 1 - n])
                n++;
            if (n > longest[tokens[end]])
                longest[tokens[end]] = n;
        }
}

static void penalise_repeats(const struct penalties *p, float *x, int32_t *longest) {
    const int64_t range = p->dry_range && p->dry_range < p->length ? p->dry_range : p->length;
    int64_t most = 0; /* tokens behind the last sequence breaker */
    while (most < p->dry_longest && most < range && !p->breakers[p->tokens[p->length - 1 - most]])
        most++;
    const int32_t *tokens = p->tokens + p->length - range;
    find_repeats(tokens, range, most, longest);
    for (int64_t end = 1; end < range; end++) {
        const int32_t token = tokens[end];
        if (tokens[end - 1] != tokens[range - 1] || longest[token] < p->dry_allowed || p->breakers[token])
            continue;
        x[token] -= (float)fmin(p->dry_multiplier * pow(p->dry_base, longest[token] - p->dry_allowed), p->dry_most);
        longest[token] = 0; /* once */
    }
}

/* Ban tokens that would complete an n-gram again, unless nothing finite would be left. */
static void ban_repeats(const struct penalties *p, float *x, int32_t *longest, int64_t vocab) {
    memset(longest, 0, 4 * vocab);
    find_repeats(p->tokens, p->length, p->ngram - 1, longest);
    for (int64_t i = 0; p->ngram == 1 && i < p->length; i++)
        longest[p->tokens[i]] = 1;
    const int64_t least = p->ngram == 1 ? 1 : p->ngram - 1;
    float best = -INFINITY; /* NaN if one of the others is */
    for (int64_t i = 0; i < vocab; i++)
        if (longest[i] < least)
            best = x[i] > best || x[i] != x[i] ? x[i] : best;
    for (int64_t i = 0; best - best == 0 && i < vocab; i++)
        if (longest[i] >= least)
            x[i] = -INFINITY;
}

/* Penalise logits; `longest` is memory for as many integers. */
static void penalise(const struct penalties *p, float *x, int32_t *longest, int64_t vocab) {
    const int32_t *draft = p->tokens + p->length - p->drafted;
    for (int64_t i = 0; i < p->drafted; i++)
        p->seen[draft[i]] |= 2, p->counts[draft[i]]++;
    for (int64_t i = 0; p->repetition != 1 && i < vocab; i++) {
        uint64_t some = 1;
        if (i % 8 == 0 && i + 8 <= vocab)
            memcpy(&some, p->seen + i, 8);
        if (!some)
            i += 7; /* none of eight */
        else if (p->seen[i])
            x[i] = x[i] > 0 ? x[i] / p->repetition : x[i] * p->repetition;
    }
    for (int64_t i = 0; (p->frequency != 0 || p->presence != 0) && i < vocab; i++)
        if (p->counts[i] > 0)
            x[i] -= p->frequency * p->counts[i] + p->presence;
    for (int64_t i = 0; i < p->drafted; i++)
        p->seen[draft[i]] &= 1, p->counts[draft[i]]--;
    if (p->dry_multiplier > 0 && p->length)
        penalise_repeats(p, x, longest);
    if (p->ngram && p->length)
        ban_repeats(p, x, longest, vocab);
}
