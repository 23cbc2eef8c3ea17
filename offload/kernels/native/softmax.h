/* What a choice among logits reads of all of them: the largest, a softmax's weights, and those above some weight. */

/* Return the largest number; NaN if one is. */
TARGET static float NAME(largest)(const float *x, int64_t count) {
    vec most = NAME(splat)(-INFINITY);
    ints bad = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vec some = NAME(at)(x + i, 0);
        most = NAME(max)(some, most);
        bad |= some != some;
    }
    float best = NAME(largest_lane)(most);
    for (int lane = 0; lane < LANES; lane++)
        best = bad[lane] ? NAN : best;
    for (; i < count; i++)
        best = x[i] > best || x[i] != x[i] ? x[i] : best;
    return best;
}

/* Write 2^((x - best) factor), zero where that is below 2^-126; return the sum. */
TARGET static double NAME(exponentials)(const float *x, float *y, int64_t count, float best, float factor) {
    enum { RUN_LENGTH = 64 * LANES }; /* numbers that are added up in fp32 */
    double sum = 0;
    for (int64_t start = 0; start < count; start += RUN_LENGTH) {
        vec run = NAME(splat)(0);
        for (int64_t i = start; i < start + RUN_LENGTH && i < count; i += LANES) {
            float last[LANES] = {0};
            const int64_t left = count - i;
            if (left < LANES) {
                for (int lane = 0; lane < LANES; lane++)
                    last[lane] = lane < left ? x[i + lane] : -INFINITY;
            }
            vec power = (NAME(at)(left < LANES ? last : x + i, 0) - best) * factor;
            vec e = (vec)((ints)NAME(exp2)(power) & (power >= NAME(splat)(-126.0f)));
            run += e;
            if (left < LANES)
                memcpy(y + i, &e, 4 * left);
            else
                *(vec_at *)(y + i) = e;
        }
        sum += NAME(sum_lanes)(run);
    }
    return sum;
}

/* Write the numbers of the elements above `least`, in order; return how many. */
TARGET static int64_t NAME(collect)(const float *y, int64_t count, float least, int32_t *ids) {
    int64_t found = 0, i = 0;
    for (; i + LANES <= count; i += LANES)
        if (NAME(any_above)(NAME(at)(y + i, 0), least))
            for (int lane = 0; lane < LANES; lane++)
                ids[found] = i + lane, found += y[i + lane] > least;
    for (; i < count; i++)
        ids[found] = i, found += y[i] > least;
    return found;
}
