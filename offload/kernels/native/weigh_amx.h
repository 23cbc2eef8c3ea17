/* The softmax of a row over one piece; included by attend_amx.h. */
/* Where the numerators of a row go: as bf16, and those of quantised values as digits `BYTE_STRIDE` bytes apart. */
struct numerators {
    uint16_t *weights;
    int8_t *digits; /* or NULL */
    int columns;
    int plain;      /* whether some values are not quantised, and `weights` are needed beside digits */
};

/* Numerators of one column tile, and what is summed of them. */
struct weighing {
    float factor, highest;
    vec total, middles;
};

INLINE vec weigh_vector(struct weighing *s, vec scores, const struct scales *values, int i) {
    vec weight = NAME(exp2)(scores * s->factor - s->highest);
    s->total += weight;
    if (values)
        s->middles += weight * *(vec_at *)(values->middles + i);
    return weight;
}

/*
 * Write the numerators of a row's softmax in powers of two; see `normalise`. Columns from `visible` on weigh nothing. Of
 * quantised values, they are multiplied by the scales, and their sum with the middles is returned.
 */
INLINE float weigh(const float *scores, struct numerators to, int visible, float factor, float *maximum, float *sum,
                   const struct scales *values) {
    int whole = visible / LANES * LANES, rest = visible - whole, i = 0;
    vec last = NAME(splat)(-INFINITY), most = last, other = last;
    for (int i = 0; i < rest; i++)
        last[i] = scores[whole + i];
    for (int i = 0; i + LANES < whole; i += 2 * LANES) {
        most = NAME(max)(*(vec_at *)(scores + i), most);
        other = NAME(max)(*(vec_at *)(scores + i + LANES), other);
    }
    if (whole % (2 * LANES))
        most = NAME(max)(*(vec_at *)(scores + whole - LANES), most);
    most = NAME(max)(last, NAME(max)(most, other));
    struct weighing s = {factor, NAME(largest_lane)(most) * factor, NAME(splat)(0), NAME(splat)(0)};
    *maximum = s.highest;
    if (to.digits)
        for (; i + SPAN <= whole; i += SPAN) {
            vec even = weigh_vector(&s, *(vec_at *)(scores + i), values, i);
            vec odd = weigh_vector(&s, *(vec_at *)(scores + i + LANES), values, i + LANES);
            store_digits(even * *(vec_at *)(values->scales + i) + ROUND_TO_DIGITS,
                         odd * *(vec_at *)(values->scales + i + LANES) + ROUND_TO_DIGITS, to.digits + i,
                         to.digits + BYTE_STRIDE + i);
            if (to.plain) {
                NAME(store_narrow)(to.weights + i, even);
                NAME(store_narrow)(to.weights + i + LANES, odd);
            }
        }
    for (; i < whole; i += LANES) {
        vec weight = weigh_vector(&s, *(vec_at *)(scores + i), values, i);
        NAME(store_narrow)(to.weights + i, values && !to.digits ? weight * *(vec_at *)(values->scales + i) : weight);
    }
    if (rest) {
        vec weight = NAME(exp2)(last * factor - s.highest);
        for (int i = rest; i < LANES; i++)
            weight[i] = 0;
        NAME(store_narrow)(to.weights + whole,
                           values && !to.digits ? weight * *(vec_at *)(values->scales + whole) : weight);
        s.total += weight;
        if (values)
            s.middles += weight * *(vec_at *)(values->middles + whole);
    }
    int end = whole + (rest ? LANES : 0);
    memset(to.weights + end, 0, sizeof *to.weights * (to.columns - end));
    float sums[LANES];
    *(vec_at *)sums = s.total;
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            sums[i] += sums[i + width];
    *sum = sums[0];
    return values ? NAME(sum_lanes)(s.middles) : 0;
}

NOINLINE static void weigh_row(const float *scores, uint16_t *weights, int visible, int columns, float factor,
                               float *maximum, float *sum) {
    weigh(scores, (struct numerators){.weights = weights, .columns = columns}, visible, factor, maximum, sum, NULL);
}

NOINLINE static float weigh_quantized(const float *scores, uint16_t *weights, int visible, int columns, float factor,
                                      float *maximum, float *sum, const struct scales *values) {
    return weigh(scores, (struct numerators){.weights = weights, .columns = columns}, visible, factor, maximum, sum,
                 values);
}

/* The same for codes that are integers. */
NOINLINE static float weigh_bytes(const float *scores, const struct numerators *to, int visible, float factor,
                                  float *maximum, float *sum, const struct scales *values) {
    struct numerators own = *to;
    if (!own.digits)
        __builtin_unreachable();
    return weigh(scores, own, visible, factor, maximum, sum, values);
}
