/*
 * Digits of quantized_bytes.h by fewer instructions, which processors with AMX have; included by attend_amx.h.
 */
#define EVERY_OTHER(i) i, i + 2, i + 4, i + 6, i + 8, i + 10, i + 12, i + 14
static const uint8_t digit_order[64] = {EVERY_OTHER(0), EVERY_OTHER(16), EVERY_OTHER(32), EVERY_OTHER(48),
                                        EVERY_OTHER(1), EVERY_OTHER(17), EVERY_OTHER(33), EVERY_OTHER(49)};
#undef EVERY_OTHER

/* The sign bits of the first half. */
INLINE ints lower_sign(void) {
    int32_t sign = (int32_t)0x80808080;
    return (ints){sign, sign, sign, sign, sign, sign, sign, sign};
}

/* Even and odd elements of 32 bf16 numbers. */
struct deinterleaved {
    vec even, odd;
};

INLINE struct deinterleaved deinterleave(const void *numbers) {
    ints pair = *(const ints_at *)numbers;
    return (struct deinterleaved){NAME(low_half)(pair), NAME(high_half)(pair)};
}

/* Split 32 words, of which 128 was added to each number, into the lower digits, less 128, and the upper ones. */
INLINE ints split_words(ints words) {
#ifdef TRIFORCE_EMULATE
    typedef int8_t bytes __attribute__((vector_size(64)));
    bytes from = (bytes)words, to;
    for (int i = 0; i < 64; i++)
        to[i] = from[i % 32 * 2 + i / 32];
    return (ints)to;
#else
    __m512i order = _mm512_loadu_si512(digit_order);
    return (ints)_mm512_permutexvar_epi8(order, (__m512i)words);
#endif
}

/* Store 32 rounded numbers as two digits each, the elements of `even` at even places. */
INLINE void store_digits(vec even, vec odd, int8_t *high, int8_t *low) {
    typedef int64_t halves __attribute__((vector_size(32)));
    typedef halves halves_at __attribute__((aligned(1), may_alias));
    union {
        ints all;
        halves half[2];
    } digits = {split_words((ints)odd << 16 | ((ints)even & 0xffff)) ^ lower_sign()};
    *(halves_at *)low = digits.half[0];
    *(halves_at *)high = digits.half[1];
}
