/*
 * Rounding weights to fewer bits, in the bits of offload/loading/formats/quantization.py, which explains what is done: its
 * operations in its order, so products are not contracted with sums. Included once per level, after tile.h.
 *
 * LANES groups are rounded at a time, one in each lane.
 */
UNFUSED

#undef HALF
#define HALF 16 /* of the weights of a group of 32, or all of a group of 16 */

INLINE vec NAME(where)(ints mask, vec x, vec y) { return (vec)(((ints)x & mask) | ((ints)y & ~mask)); }

INLINE vec NAME(min)(vec x, vec y) {
#if HAS_MAX && LANES == 16
    return (vec)_mm512_min_ps((__m512)x, (__m512)y);
#elif HAS_MAX && LANES == 8
    return (vec)_mm256_min_ps((__m256)x, (__m256)y);
#else
    return NAME(where)(x < y, x, y);
#endif
}

INLINE ints NAME(is_odd)(vec x) { return ((ints)x & 0x7fffffff) >= 0x7f800000; } /* infinite or NaN */

INLINE int NAME(any)(ints mask) {
    int found = 0;
    for (int i = 0; i < LANES; i++)
        found |= mask[i];
    return found != 0;
}

/* Narrow to fp16, in 32 bits each: to nearest, ties to even; NaN becomes infinite. */
INLINE ints NAME(to_half)(vec x) {
    ints size = (ints)x & 0x7fffffff;
    ints normal = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
    ints subnormal = (ints)((vec)size + 0.5f) - 0x3f000000; /* the sum rounds */
    ints small = size < 0x38800000, large = size >= 0x47800000;
    ints half = (subnormal & small) | (normal & ~small);
    return (half & ~large) | (0x7c00 & large) | ((ints)x >> 16 & 0x8000);
}

INLINE vec NAME(from_half)(ints half) {
    vec size = (vec)((half & 0x7fff) << 13) * 0x1p112f;
    size = NAME(where)((half & 0x7c00) == 0x7c00, NAME(splat)(INFINITY), size);
    return (vec)((ints)size | (half & 0x8000) << 16);
}

/* Return the whole numbers nearest to x / scale, ties to even; 0 where the scale is 0. */
INLINE vec NAME(steps)(vec x, vec scale, float first, float last) {
    vec y = x / NAME(where)(scale == 0, NAME(splat)(INFINITY), scale);
    y = (y + 0x1.8p23f) - 0x1.8p23f; /* what is too large for this lies beyond `last` */
    return NAME(min)(NAME(splat)(last), NAME(max)(NAME(splat)(first), y));
}

/* Return the sum of HALF vectors, added pairwise: each to the one half of them further. They are overwritten. */
INLINE vec NAME(pairwise)(vec *x) {
    UNROLL for (int i = 0; i < 8; i++)
        x[i] += x[i + 8];
    UNROLL for (int i = 0; i < 4; i++)
        x[i] += x[i + 4];
    return (x[0] + x[2]) + (x[1] + x[3]);
}

/* Load LANES groups of `inputs` weights, one into each lane; behind the last group it is repeated. */
INLINE void NAME(load_groups)(const struct rounding *r, int64_t first, int64_t groups, const int inputs, vec *x) {
    int32_t columns[GROUP_INPUTS * LANES] __attribute__((aligned(4 * LANES), may_alias));
    const int words = r->wide ? inputs : inputs / 2;
    for (int lane = 0; lane < LANES; lane++) {
        int64_t group = first + lane < groups ? first + lane : groups - 1;
        const char *from = (const char *)r->weight + group * words * 4;
        for (int i = 0; i < words; i++)
            memcpy(columns + i * LANES + lane, from + 4 * i, 4);
    }
    for (int i = 0; i < words; i++) {
        ints word = ((const ints_at *)columns)[i];
        if (r->wide) {
            x[i] = (vec)word;
        } else {
            x[2 * i] = NAME(low_half)(word);
            x[2 * i + 1] = NAME(high_half)(word);
        }
    }
}

/* Store the codes of LANES groups as bytes. */
INLINE void NAME(store_codes)(const struct rounding *r, int64_t first, int64_t groups, const int inputs, const vec *code) {
    int32_t columns[GROUP_INPUTS / 4 * LANES] __attribute__((aligned(4 * LANES), may_alias));
    for (int i = 0; i < inputs; i += 4) {
        ints word = {0};
        for (int byte = 0; byte < 4; byte++)
            word |= (__builtin_convertvector(code[i + byte], ints) & 255) << 8 * byte;
        ((ints_at *)columns)[i / 4] = word;
    }
    for (int lane = 0; lane < LANES && first + lane < groups; lane++)
        for (int i = 0; i < inputs / 4; i++)
            memcpy(r->codes + (first + lane) * inputs + 4 * i, columns + i * LANES + lane, 4);
}

INLINE void NAME(store_halves)(uint16_t *to, int64_t first, int64_t groups, ints half) {
    for (int lane = 0; lane < LANES && first + lane < groups; lane++)
        to[first + lane] = (uint16_t)half[lane];
}

/* Fit scale and minimum to codes by least squares; `mean` is that of x. */
INLINE void NAME(fit_line)(const vec *x, vec mean, const vec *code, vec *scale, vec *minimum) {
    vec products[HALF], squares[HALF], sum = NAME(splat)(0);
    for (int i = 0; i < GROUP_INPUTS; i++) /* of small whole numbers: exact in any order */
        sum += code[i];
    vec mean_code = sum / (float)GROUP_INPUTS;
    for (int i = 0; i < HALF; i++) {
        vec centred = code[i] - mean_code, other = code[i + HALF] - mean_code;
        products[i] = centred * (x[i] - mean) + other * (x[i + HALF] - mean);
        squares[i] = centred * centred + other * other;
    }
    vec spread = NAME(max)(NAME(splat)(1e-9f), NAME(pairwise)(squares));
    *scale = NAME(pairwise)(products) / spread;
    *minimum = mean - *scale * mean_code;
}

/* Round groups to codes, scales and minima. Return 1 for weights that are not finite, or too large for fp16. */
NOINLINE static int NAME(round_lines)(const struct rounding *r, int64_t first) {
    vec x[GROUP_INPUTS], code[GROUP_INPUTS], best[GROUP_INPUTS], errors[HALF];
    NAME(load_groups)(r, first, r->groups, GROUP_INPUTS, x);
    vec low = x[0], high = x[0];
    ints odd = {0};
    for (int i = 0; i < GROUP_INPUTS; i++) {
        low = NAME(min)(x[i], low), high = NAME(max)(x[i], high);
        odd |= NAME(is_odd)(x[i]);
    }
    for (int i = 0; i < HALF; i++)
        errors[i] = x[i] + x[i + HALF];
    vec mean = NAME(pairwise)(errors) / (float)GROUP_INPUTS, least = low;
    const float most = (float)((1 << r->bits) - 1);
    vec scale = (high - low) / most, minimum = low;
    ints best_scale = {0}, best_minimum = {0};
    for (int fit = 0; fit < r->fits; fit++) {
        ints half_scale = NAME(to_half)(scale), half_minimum = NAME(to_half)(minimum);
        scale = NAME(from_half)(half_scale), minimum = NAME(from_half)(half_minimum);
        for (int i = 0; i < HALF; i++) {
            vec pair[2];
            UNROLL for (int j = 0; j < 2; j++) {
                vec from = x[i + j * HALF], to = NAME(steps)(from - minimum, scale, 0, most);
                code[i + j * HALF] = to;
                pair[j] = to * scale + minimum - from;
            }
            errors[i] = pair[0] * pair[0] + pair[1] * pair[1];
        }
        vec error = NAME(pairwise)(errors);
        ints better = fit ? (ints)(error < least) : ~(ints){0};
        for (int i = 0; i < GROUP_INPUTS; i++)
            best[i] = NAME(where)(better, code[i], best[i]);
        least = NAME(where)(better, error, least);
        best_scale = (half_scale & better) | (best_scale & ~better);
        best_minimum = (half_minimum & better) | (best_minimum & ~better);
        if (fit == 0)
            odd |= NAME(is_odd)(scale) | NAME(is_odd)(minimum);
        if (fit < r->fits - 1)
            NAME(fit_line)(x, mean, code, &scale, &minimum);
    }
    NAME(store_codes)(r, first, r->groups, GROUP_INPUTS, best);
    NAME(store_halves)(r->scales, first, r->groups, best_scale);
    NAME(store_halves)(r->minima, first, r->groups, best_minimum);
    return NAME(any)(odd);
}

/* Fit the scales of groups of 16; return those that are not finite. */
INLINE ints NAME(fit_scales)(const vec *x, float first, float last, int fits, vec *result) {
    vec low = x[0], high = x[0], code[16], errors[16], least = x[0];
    ints odd = {0};
    for (int i = 0; i < 16; i++) {
        low = NAME(min)(x[i], low), high = NAME(max)(x[i], high);
        odd |= NAME(is_odd)(x[i]);
    }
    vec scale = NAME(where)(-low > high, low, high) / first;
    for (int fit = 0; fit < fits; fit++) {
        vec squares = NAME(splat)(0);
        for (int i = 0; i < 16; i++) {
            code[i] = NAME(steps)(x[i], scale, first, last);
            vec product = code[i] * scale, error = product - x[i];
            errors[i] = error * error;
            squares += code[i] * code[i]; /* small whole numbers: exact in any order */
        }
        vec error = NAME(pairwise)(errors);
        ints better = fit ? (ints)(error < least) : ~(ints){0};
        least = NAME(where)(better, error, least);
        *result = NAME(where)(better, scale, *result);
        for (int i = 0; i < 16; i++)
            code[i] *= x[i];
        scale = NAME(pairwise)(code) / NAME(max)(NAME(splat)(1), squares);
    }
    return odd;
}

/* Round a block of 16 groups of 16 to codes, 8-bit scales and the fp16 factor of the scales. */
NOINLINE static int NAME(round_nested)(const struct rounding *r, int64_t block) {
    const float first = -32, last = 31;
    vec x[VECTORS][16], scales[VECTORS];
    ints odd = {0};
    float widest = 0;
    for (int v = 0; v < VECTORS; v++) {
        scales[v] = NAME(splat)(0);
        NAME(load_groups)(r, 16 * block + v * LANES, 16 * r->groups, 16, x[v]);
        odd |= NAME(fit_scales)(x[v], first, last, r->fits, scales + v);
        for (int i = 0; i < LANES; i++)
            if (v + i == 0 || fabsf(scales[v][i]) > fabsf(widest))
                widest = scales[v][i];
    }
    ints half = NAME(to_half)(NAME(splat)(widest / -128));
    vec factor = NAME(from_half)(half);
    for (int v = 0; v < VECTORS; v++) {
        vec steps = NAME(steps)(scales[v], factor, -128, 127), scale = steps * factor;
        for (int i = 0; i < 16; i++)
            x[v][i] = NAME(steps)(x[v][i], scale, first, last) - first;
        NAME(store_codes)(r, 16 * block + v * LANES, 16 * r->groups, 16, x[v]);
        for (int i = 0; i < LANES; i++)
            ((int8_t *)r->scales)[16 * block + v * LANES + i] = (int8_t)steps[i];
    }
    r->minima[block] = (uint16_t)half[0];
    return NAME(any)(odd | NAME(is_odd)(factor));
}

/* Round groups to 8-bit codes and scales. */
NOINLINE static int NAME(round_bytes)(const struct rounding *r, int64_t first) {
    vec x[GROUP_INPUTS], size = NAME(splat)(0);
    NAME(load_groups)(r, first, r->groups, GROUP_INPUTS, x);
    ints odd = {0};
    for (int i = 0; i < GROUP_INPUTS; i++) {
        size = NAME(max)((vec)((ints)x[i] & 0x7fffffff), size);
        odd |= NAME(is_odd)(x[i]);
    }
    ints half = NAME(to_half)(size / 127);
    vec scale = NAME(from_half)(half);
    for (int i = 0; i < GROUP_INPUTS; i++)
        x[i] = NAME(steps)(x[i], scale, -127, 127);
    NAME(store_codes)(r, first, r->groups, GROUP_INPUTS, x);
    NAME(store_halves)(r->scales, first, r->groups, half);
    return NAME(any)(odd | NAME(is_odd)(scale));
}

TARGET static int NAME(round_some)(const void *call, int64_t first, int64_t last) {
    const struct rounding *r = call;
    int odd = 0;
    for (int64_t i = first; i < last && !odd; i++)
        odd = r->bits == 6   ? NAME(round_nested)(r, i)
              : r->bits == 8 ? NAME(round_bytes)(r, i * LANES)
                             : NAME(round_lines)(r, i * LANES);
    return odd;
}

TARGET static int NAME(round)(const void *call) {
    const struct rounding *r = call;
    int64_t parts = r->bits == 6 ? r->groups : (r->groups + LANES - 1) / LANES;
    return pool_run(NAME(round_some), r, parts);
}

END_UNFUSED
