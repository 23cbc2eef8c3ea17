/*
 * Sampling with noise that depends on seed, position and token alone: speculation/sampling/noise.py, which defines it, decides
 * what is too close for the rounding of the logarithm here, which compilers may contract.
 */
enum { NOISE_GROUPS = 32 }; /* counters computed together, with 4 tokens each */
static const double TOO_CLOSE = 1e-6;

/* Philox4x32-10 (Salmon et al., 2011) for the counters group + i, position, 0, 0. */
static void noise_words(uint32_t *words, uint32_t group, uint32_t position, uint64_t seed) {
    uint32_t c[4][NOISE_GROUPS], key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
    for (int i = 0; i < NOISE_GROUPS; i++)
        c[0][i] = group + i, c[1][i] = position, c[2][i] = c[3][i] = 0;
    for (int round = 0; round < 10; round++, key0 += 0x9E3779B9, key1 += 0xBB67AE85)
        for (int i = 0; i < NOISE_GROUPS; i++) {
            uint64_t first = (uint64_t)c[0][i] * 0xD2511F53, second = (uint64_t)c[2][i] * 0xCD9E8D57;
            c[0][i] = (uint32_t)(second >> 32) ^ c[1][i] ^ key0, c[1][i] = (uint32_t)second;
            c[2][i] = (uint32_t)(first >> 32) ^ c[3][i] ^ key1, c[3][i] = (uint32_t)first;
        }
    for (int i = 0; i < NOISE_GROUPS; i++)
        for (int w = 0; w < 4; w++)
            words[4 * i + w] = c[w][i];
}

/* Return whether one of the scores may be above `least`. An exponential is larger than its uniform number. */
static int any_above(const float *p, const uint32_t *words, int64_t count, double least) {
    float bound = (float)(least * (0x1p-31 * (1 - 1e-6)));
    int any = 0;
    for (int64_t i = 0; i < count; i++)
        any |= p[i] > (float)(int32_t)(words[i] >> 1) * bound;
    return any;
}

static int any_positive(const float *p, int64_t count) {
    int any = 0;
    for (int64_t i = 0; i < count; i++)
        any |= p[i] > 0;
    return any;
}

/* Return the token with the largest p / exponential, or -1 if the second largest is too close to it, or there is none. */
int64_t triforce_pick(const float *p, int64_t vocab, uint64_t seed, int64_t position) {
    uint32_t words[4 * NOISE_GROUPS];
    double best = 0, second = 0;
    int64_t token = -1;
    for (int64_t start = 0; start < vocab; start += 4 * NOISE_GROUPS) {
        int64_t count = vocab - start < 4 * NOISE_GROUPS ? vocab - start : 4 * NOISE_GROUPS;
        if (!any_positive(p + start, count))
            continue;
        noise_words(words, (uint32_t)(start / 4), (uint32_t)position, seed);
        if (!any_above(p + start, words, count, second))
            continue;
        for (int64_t i = 0; i < count; i++) {
            double u = (words[i] + 0.5) * 0x1p-32, chance = p[start + i];
            if (!(chance > u * second)) /* the exponential is larger than u, so the score is below chance / u */
                continue;
            double score = chance / -log1p(-u);
            if (score > best)
                second = best, best = score, token = start + i;
            else if (score > second)
                second = score;
        }
    }
    return second < best * (1 - TOO_CLOSE) ? token : -1;
}
