/*
 * Linear attention by the gated delta rule (arXiv 2412.06464), token by token, head by head, with the convolution
 * before it. Included once per level, after rows.h. Every sum is made in one order, whatever tokens are beside one.
 */

/* Convolve `count` channels from number `channel` on for one token, and apply silu. */
INLINE void NAME(convolve)(const struct delta *d, int64_t token, int64_t channel, int count, float *to) {
    for (int i = 0; i < count; i += LANES) {
        vec sum = NAME(splat)(0);
        for (int t = 0; t < d->kernel; t++)
            sum += NAME(load)(d->rows, (token + t) * d->width + channel + i, d->wide) *
                   NAME(at)(d->conv + t * d->width + channel + i, 0);
        *(vec_at *)(to + i) = NAME(silu)(sum);
    }
}

/* Scale a vector to `length`. */
INLINE void NAME(scale_to)(float length, float *x, int count) {
    vec squares = NAME(splat)(0);
    for (int i = 0; i < count; i += LANES)
        squares += NAME(at)(x + i, 0) * NAME(at)(x + i, 0);
    float sum = 1e-6f;
    for (int i = 0; i < LANES; i++)
        sum += squares[i];
    for (int i = 0; i < count; i += LANES)
        *(vec_at *)(x + i) = NAME(at)(x + i, 0) * (length / sqrtf(sum));
}

/* Let a token change LANES columns of a head's state, and write their outputs. */
INLINE void NAME(change_columns)(const struct delta *d, float *state, const float *q, const float *k, vec v,
                                 float decay, float rate, float *out) {
    vec known = NAME(splat)(0), sum = NAME(splat)(0);
    for (int i = 0; i < d->key_dim; i++)
        known += NAME(at)(state + (int64_t)i * d->value_dim, 0) * k[i];
    vec change = (v - known * decay) * rate;
    for (int i = 0; i < d->key_dim; i++) {
        vec_at *column = (vec_at *)(state + (int64_t)i * d->value_dim);
        *column = *column * decay + change * k[i];
        sum += *column * q[i];
    }
    *(vec_at *)out = sum;
}

/* Run one token through one head. */
NOINLINE static void NAME(delta_token)(const struct delta *d, int64_t head, int64_t token) {
    float q[MAX_HEAD_DIM], k[MAX_HEAD_DIM], v[MAX_HEAD_DIM];
    int64_t keys = (int64_t)d->key_heads * d->key_dim, key_head = head / (d->value_heads / d->key_heads);
    NAME(convolve)(d, token, key_head * d->key_dim, d->key_dim, q);
    NAME(convolve)(d, token, keys + key_head * d->key_dim, d->key_dim, k);
    NAME(convolve)(d, token, 2 * keys + head * d->value_dim, d->value_dim, v);
    NAME(scale_to)(1 / sqrtf(d->key_dim), q, d->key_dim);
    NAME(scale_to)(1, k, d->key_dim);
    const float *gates = d->gates + token * 2 * d->value_heads;
    float rate = 1 / (1 + expf(-gates[head])), x = gates[d->value_heads + head] + d->bias[head];
    float softplus = x > 20 ? x : log1pf(expf(x)); /* beyond 20 they are the same in fp32 */
    float decay = expf(d->decay[head] * softplus);
    float *state = d->state + head * d->key_dim * d->value_dim;
    float *out = d->out + (token * d->value_heads + head) * d->value_dim;
    for (int i = 0; i < d->value_dim; i += LANES)
        NAME(change_columns)(d, state + i, q, k, NAME(at)(v + i, 0), decay, rate, out + i);
}

TARGET static int NAME(delta_heads)(const void *call, int64_t first, int64_t last) {
    const struct delta *d = call;
    for (int64_t head = first; head < last; head++)
        for (int64_t token = 0; token < d->tokens; token++)
            NAME(delta_token)(d, head, token);
    return 0;
}

TARGET static int NAME(delta)(const void *call) {
    return pool_run(NAME(delta_heads), call, ((const struct delta *)call)->value_heads);
}
