/*
 * Attention to a group of quantised keys and values by products of bytes; included once per level that has them.
 *
 * Codes stay bytes. The other factor, a query times the keys' scales or numerators times the values'
 * scales, becomes integers of two signed digits of 8 bits: it is rounded to 1/65278 of the largest magnitude (for
 * numerators, which are at most 1, of the largest scale), which is finer than bf16. Their sums are exact. The instruction
 * takes unsigned codes: 128 is added to each, and 128 times the sum of the integers subtracted.
 */
enum { DIGITS_MOST = 127 * 256 + 127, BYTE_TILE = 4 /* rows whose sums fit the registers */ };

/* Adding it rounds a number to an integer; with 128, the lower digit is signed. */
#define ROUND_TO_DIGITS (12582912.0f + 128) /* 1.5 * 2^23 */

/* Return the unit of integers for a largest magnitude, and set its inverse, 0 where there is nothing to divide. */
INLINE float NAME(unit_of)(float largest, float *inverse) {
    *inverse = largest > 0x1p-112f ? DIGITS_MOST / largest : 0;
    return largest * (1.0f / DIGITS_MOST);
}

/* What the lower digits of a row are too large by: -128 times the sum of its numbers. Of NaN it wraps. */
INLINE int32_t NAME(digit_offset)(uints x) {
    uint32_t sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += x[i];
    return (int32_t)(0u - 128 * sum);
}

/* Sums of products of digits, with the offset of their row. */
INLINE vec NAME(digit_sums)(ints sums, int32_t offset) {
    return __builtin_convertvector((ints)((uints)sums + (uint32_t)offset), vec);
}

INLINE vec NAME(magnitude)(vec x) { return (vec)((ints)x & 0x7fffffff); }

/* Store 32 rounded numbers as two digits each, the elements of `even` at even places, and return their pairwise sums. */
INLINE uints NAME(put_digits)(vec even, vec odd, int8_t *high, int8_t *low) {
    typedef uint16_t words __attribute__((vector_size(64)));
    typedef int8_t bytes __attribute__((vector_size(32)));
    typedef bytes bytes_at __attribute__((aligned(1), may_alias));
    words both = (words)((ints)odd << 16 | ((ints)even & 0xffff));
    *(bytes_at *)high = __builtin_convertvector(both >> 8, bytes);
    *(bytes_at *)low = __builtin_convertvector(both, bytes) ^ (int8_t)-128;
    uints zero = (uints)NAME(splat)(ROUND_TO_DIGITS);
    return (uints)even - zero + ((uints)odd - zero);
}

/* Rows of digits, and two columns of lines that they are multiplied with. */
struct NAME(byte_tile) {
    const char *columns[2];
    int lines;
    int64_t stride; /* bytes between digits of a row; its high ones come first */
};

INLINE void NAME(run_bytes)(const int rows, const struct NAME(byte_tile) *t, const int8_t *digits,
                            ints sums[BYTE_TILE][2]) {
    const int32_t sign = (int32_t)0x80808080; /* adds 128 to each code */
    const int64_t stride = t->stride;
    ints s[BYTE_TILE][2][2];
    UNROLL for (int i = 0; i < rows * 4; i++)
        s[i / 4][i / 2 % 2][i % 2] = (ints){0};
    for (int line = 0; line < t->lines; line += 2)
        UNROLL for (int column = 0; column < 2; column++) {
            const ints_at *at_codes = (const ints_at *)(t->columns[column] + line * 64);
            ints codes[2] = {at_codes[0] ^ sign, at_codes[1] ^ sign};
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int i = 0; i < 4; i++) {
                    const int8_t *at = digits + (2 * r + i % 2) * stride + 4 * (line + i / 2);
                    s[r][column][i % 2] =
                        NAME(dot_bytes)(s[r][column][i % 2], codes[i / 2], *(const NAME(pair_at) *)at);
                }
        }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int column = 0; column < 2; column++)
            sums[r][column] = (s[r][column][0] << 8) + s[r][column][1];
}

#define CASE(rows)                                                                                                 \
    case rows: NAME(run_bytes)(rows, t, digits, sums); break;
TARGET static void NAME(run_byte_tile)(int rows, const struct NAME(byte_tile) *t, const int8_t *digits,
                                       ints sums[BYTE_TILE][2]) {
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4)
    }
}
#undef CASE

/* Load pairs of bf16 numbers; the second half is zero where there are only 16. */
INLINE ints NAME(load_pairs)(const uint16_t *from, int count) {
    ints pairs = *(const ints_at *)from;
    for (int i = count / 2; i < LANES; i++)
        pairs[i] = 0;
    return pairs;
}

/* Convert rows of queries, multiplied by the scales of a group's keys, to digits, and sum them with the middles. */
NOINLINE static void NAME(query_digits)(const struct attention *a, struct NAME(dequantized) *w, const char *group,
                                        const uint16_t *queries, int rows, int64_t stride) {
    const int dim = a->head_dim;
    const uint16_t *scales = (const uint16_t *)group, *middles = scales + dim;
    for (int r = 0; r < rows; r++) {
        vec largest = NAME(splat)(0), sum = largest;
        for (int d = 0; d < dim; d += 32) {
            ints q = NAME(load_pairs)(queries + r * dim + d, dim - d), s = NAME(load_pairs)(scales + d, dim - d);
            ints m = NAME(load_pairs)(middles + d, dim - d);
            vec even = NAME(low_half)(q) * NAME(low_half)(s), odd = NAME(high_half)(q) * NAME(high_half)(s);
            sum += NAME(low_half)(q) * NAME(low_half)(m) + NAME(high_half)(q) * NAME(high_half)(m);
            largest = NAME(max)(NAME(magnitude)(even), NAME(max)(NAME(magnitude)(odd), largest));
            *(vec_at *)(w->queries + d) = even;
            *(vec_at *)(w->queries + d + LANES) = odd;
        }
        float inverse;
        w->units[r] = NAME(unit_of)(NAME(largest_lane)(largest), &inverse);
        w->sums[r] = NAME(sum_lanes)(sum);
        uints total = {0};
        int8_t *high = w->digits + 2 * r * stride;
        for (int d = 0; d < dim; d += 32)
            total += NAME(put_digits)(*(vec_at *)(w->queries + d) * inverse + ROUND_TO_DIGITS,
                                      *(vec_at *)(w->queries + d + LANES) * inverse + ROUND_TO_DIGITS, high + d,
                                      high + stride + d);
        w->offsets[r] = NAME(digit_offset)(total);
    }
}

/* Compute the scores [rows][SPAN] of a group's keys. */
INLINE void NAME(score_bytes)(const struct attention *a, struct NAME(dequantized) *w, const char *group, int rows,
                              int64_t stride, float *scores) {
    const int dim = a->head_dim;
    const char *codes = key_codes(group, dim);
    struct NAME(byte_tile) t = {{codes, codes + 16 * dim}, dim / 4, stride};
    for (int row = 0; row < rows; row += BYTE_TILE) {
        ints sums[BYTE_TILE][2];
        int some = rows - row < BYTE_TILE ? rows - row : BYTE_TILE;
        NAME(run_byte_tile)(some, &t, w->digits + 2 * row * stride, sums);
        for (int r = row; r < row + some; r++)
            for (int column = 0; column < 2; column++) {
                vec score = NAME(digit_sums)(sums[r - row][column], w->offsets[r]);
                *(vec_at *)(scores + r * SPAN + column * BLOCK) = score * w->units[r] + w->sums[r];
            }
    }
}

/* Convert numerators [rows][SPAN], multiplied by the scales of a group's values, to digits; return their unit. */
NOINLINE static float NAME(weight_digits)(const struct attention *a, struct NAME(dequantized) *w, const char *group,
                                          const float *weights, int rows) {
    const uint16_t *numbers = (const uint16_t *)group + 2 * a->head_dim;
    vec zero = NAME(splat)(0), even = NAME(load)(numbers, 0, 0), odd = NAME(load)(numbers, BLOCK, 0);
    vec even_middle = NAME(load)(numbers, SPAN, 0), odd_middle = NAME(load)(numbers, SPAN + BLOCK, 0);
    float inverse, unit = NAME(unit_of)(NAME(largest_lane)(NAME(max)(even, NAME(max)(odd, zero))), &inverse);
    even *= inverse, odd *= inverse;
    for (int r = 0; r < rows; r++) {
        vec first = *(const vec_at *)(weights + r * SPAN), second = *(const vec_at *)(weights + r * SPAN + BLOCK);
        int8_t *high = w->digits + 2 * r * SPAN;
        uints total = NAME(put_digits)(first * even + ROUND_TO_DIGITS, second * odd + ROUND_TO_DIGITS, high, high + SPAN);
        w->offsets[r] = NAME(digit_offset)(total);
        w->sums[r] = NAME(sum_lanes)(first * even_middle + second * odd_middle);
    }
    return unit;
}

/* Add the values of a group, weighted by the digits, to the output of each row. */
INLINE void NAME(gather_bytes)(const struct attention *a, const struct NAME(dequantized) *w, const char *group, int rows,
                               float unit, float *out) {
    const int dim = a->head_dim;
    const char *codes = value_codes(group, dim);
    const int64_t column = 8 * 64;
    for (int d = 0; d < dim; d += 2 * BLOCK) {
        const int columns = dim - d > BLOCK ? 2 : 1;
        const char *first = codes + d / BLOCK * column;
        struct NAME(byte_tile) t = {{first, first + (columns - 1) * column}, 8, SPAN};
        for (int row = 0; row < rows; row += BYTE_TILE) {
            ints sums[BYTE_TILE][2];
            int some = rows - row < BYTE_TILE ? rows - row : BYTE_TILE;
            NAME(run_byte_tile)(some, &t, w->digits + 2 * row * SPAN, sums);
            for (int r = row; r < row + some; r++)
                for (int c = 0; c < columns; c++)
                    *(vec_at *)(out + r * dim + d + c * BLOCK) +=
                        NAME(digit_sums)(sums[r - row][c], w->offsets[r]) * unit + w->sums[r];
        }
    }
}
