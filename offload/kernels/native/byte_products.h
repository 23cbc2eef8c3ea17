/*
 * Products of codes of a byte and activations of 16 bits, four inputs to a lane of 32 bits, in exact integers. Included once
 * per level, after tile.h.
 *
 * Activations are two digits of 8 bits, 256 high + low. Some levels have an instruction that adds four products of bytes
 * to a lane: VNNI's takes unsigned codes, NEON's signed ones. The others sum two neighbouring products in 16 bits, and
 * two of those sums in 32 bits; there, codes of more than 6 bits are widened and multiplied with whole activations.
 */
typedef int8_t NAME(fours) __attribute__((vector_size(4 * LANES))); /* four in each lane of 32 bits */
typedef uint16_t NAME(twos) __attribute__((vector_size(4 * LANES)));
typedef NAME(twos) NAME(twos_at) __attribute__((aligned(1), may_alias));
#define BYTE_DOTS DOTS       /* four products are added by one instruction */
#define UNSIGNED_CODES BYTES /* and it takes unsigned codes */
#if !HAS_MAX
#define SUM_NOW(x)
#elif defined(__x86_64__) /* or GCC keeps products until they are all summed, and has no registers for them */
#define SUM_NOW(x) __asm__("" : "+x"(x))
#else
#define SUM_NOW(x) __asm__("" : "+w"(x))
#endif
#define ROLLED _Pragma("GCC unroll 1")

/* Convert LANES signed integers of 8 bits. */
INLINE vec NAME(small)(const char *memory, int vector) {
#if HAS_MAX && LANES == 16
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)memory + vector)));
#elif HAS_MAX && LANES == 8
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(memory + 8 * vector))));
#elif HAS_MAX
    int32_t word;
    memcpy(&word, memory + 4 * vector, 4);
    return (vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8((uint32_t)word)))));
#else
    typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
    return __builtin_convertvector(((const bytes *)memory)[vector], vec);
#endif
}

/* Convert LANES fp16 numbers; they are finite. */
INLINE vec NAME(halves)(const char *memory, int vector) {
#if HAS_MAX && LANES == 16
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)memory + vector));
#elif HAS_MAX && LANES == 8
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)memory + vector));
#else
    ints bits = NAME(shorts)(memory + 2 * LANES * vector);
    vec size = (vec)((bits & 0x7fff) << 13) * 0x1p112f; /* the exponent's bias: 127 - 15; exact */
    return (vec)((ints)size | (bits & 0x8000) << 16);
#endif
}

/* Store numbers of 32 lanes as bytes, which they fit. */
INLINE void NAME(put_bytes)(int8_t *to, const ints x[GROUP_INPUTS / LANES]) {
#if HAS_MAX && LANES == 8
    const __m256i first = _mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]);
    const __m256i second = _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* of four numbers each */
    _mm256_storeu_si256((__m256i *)to, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(first, second), order));
#elif HAS_MAX && LANES == 4
    UNROLL for (int i = 0; i < GROUP_INPUTS / LANES; i += 2) {
        const int16x8_t both = vcombine_s16(vmovn_s32((int32x4_t)x[i]), vmovn_s32((int32x4_t)x[i + 1]));
        vst1_s8(to + i * LANES, vmovn_s16(both));
    }
#else
    typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
    UNROLL for (int i = 0; i < GROUP_INPUTS / LANES; i++)
        ((bytes *)to)[i] = __builtin_convertvector(x[i], bytes);
#endif
}

/* Store them as 16 bits, each four in the order 0, 2, 1, 3. */
INLINE void NAME(put_words)(int8_t *to, const ints x[GROUP_INPUTS / LANES]) {
#if HAS_MAX && LANES == 8
    UNROLL for (int i = 0; i < GROUP_INPUTS / LANES; i += 2) {
        const __m256i apart = _mm256_packs_epi32((__m256i)x[i], (__m256i)x[i + 1]); /* lanes of 64 bits 0, 2, 1, 3 */
        const __m256i words = _mm256_permute4x64_epi64(apart, 0xd8);
        _mm256_storeu_si256((__m256i *)(to + 2 * i * LANES),
                            _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xd8), 0xd8));
    }
#else
    for (int i = 0; i < GROUP_INPUTS; i++) {
        const int16_t word = (int16_t)x[i / LANES][i % LANES];
        memcpy(to + 2 * (i - i % 4 + i % 2 * 2 + i % 4 / 2), &word, 2);
    }
#endif
}

/* Read four digits. */
INLINE int32_t NAME(four)(const int8_t *digits) {
    int32_t four;
    memcpy(&four, digits, 4);
    return four;
}

/* Return entries 0 to 15 of a table by codes, which are not larger. */
#if HAS_MAX && LANES == 16
INLINE NAME(fours) NAME(look_up)(const int8_t *table, NAME(fours) codes) {
    const __m512i entries = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
    return (NAME(fours))_mm512_shuffle_epi8(entries, (__m512i)codes);
}
#elif HAS_MAX && LANES == 8
INLINE NAME(fours) NAME(look_up)(const int8_t *table, NAME(fours) codes) {
    const __m256i entries = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return (NAME(fours))_mm256_shuffle_epi8(entries, (__m256i)codes);
}
#elif HAS_MAX
INLINE NAME(fours) NAME(look_up)(const int8_t *table, NAME(fours) codes) {
    return (NAME(fours))vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)codes);
}
#else
NOINLINE static NAME(fours) NAME(look_up)(const int8_t *table, NAME(fours) codes) {
    for (int i = 0; i < 4 * LANES; i++)
        codes[i] = table[codes[i]];
    return codes;
}
#endif

#if BYTE_DOTS
/* Add the products of four codes and four digits to each lane. */
INLINE ints NAME(dot_bytes)(ints sum, ints codes, int32_t digits) {
#ifdef TRIFORCE_EMULATE
    for (int k = 0; k < 32; k += 8)
        sum += (codes >> k & 255) * (int32_t)(int8_t)(digits >> k);
    return sum;
#elif LANES == 4
    return (ints)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, vreinterpretq_s8_s32(vdupq_n_s32(digits)));
#else
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(digits));
#endif
}

struct NAME(sums) {
    ints high, low;
};

/* Add the products of `count` vectors of codes and a row's activations, from the first of these inputs on. */
INLINE void NAME(add_products)(const int count, const int is_wide, const NAME(fours) *codes, const int8_t *x,
                               struct NAME(sums) *s) {
    UNROLL for (int i = 0; i < count; i++) {
        s->high = NAME(dot_bytes)(s->high, (ints)codes[i], NAME(four)(x + 4 * i));
        s->low = NAME(dot_bytes)(s->low, (ints)codes[i], NAME(four)(x + GROUP_INPUTS + 4 * i));
    }
}

INLINE ints NAME(sum_of)(struct NAME(sums) s) { return (s.high << 8) + s.low; }
#else
/* Return sums of two neighbouring products of unsigned codes and signed digits, in 16 bits. */
INLINE NAME(twos) NAME(byte_pairs)(NAME(fours) codes, int32_t digits) {
#if HAS_MAX && LANES == 8
    return (NAME(twos))_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(digits));
#elif HAS_MAX
    const int8x16_t c = (int8x16_t)codes, d = vreinterpretq_s8_s32(vdupq_n_s32(digits)); /* codes are below 128 */
    return (NAME(twos))vpaddq_s16(vmull_s8(vget_low_s8(c), vget_low_s8(d)), vmull_high_s8(c, d));
#else
    const NAME(twos) c = (NAME(twos))codes, d = (NAME(twos))(digits - (ints){0});
    const NAME(twos) low = (d & 255) - ((d & 128) << 1), high = (d >> 8) - ((d >> 15) << 8); /* with their signs */
    return (c & 255) * low + (c >> 8) * high;
#endif
}

/* Return sums of two neighbouring products of 16 bits, all signed. */
INLINE ints NAME(word_pairs)(NAME(twos) x, int32_t factors) {
#if HAS_MAX && LANES == 8
    return (ints)_mm256_madd_epi16((__m256i)x, _mm256_set1_epi32(factors));
#elif HAS_MAX
    const int16x8_t w = (int16x8_t)x, f = vreinterpretq_s16_s32(vdupq_n_s32(factors));
    return (ints)vpaddq_s32(vmull_s16(vget_low_s16(w), vget_low_s16(f)), vmull_high_s16(w, f));
#else
    return ((ints)x << 16 >> 16) * (int32_t)(int16_t)factors + ((ints)x >> 16) * (factors >> 16);
#endif
}

struct NAME(sums) {
    ints all;
};

/* Add the products of `count` vectors of codes, whose sums fit 16 bits, and a row's activations. All but `s` as above. */
INLINE void NAME(add_products)(const int count, const int is_wide, const NAME(fours) *codes, const int8_t *x,
                               struct NAME(sums) *s) {
    if (is_wide) { /* activations of 16 bits in the order 0, 2, 1, 3 */
        typedef int16_t shorts __attribute__((vector_size(4 * LANES)));
        const NAME(twos) even = (NAME(twos))((shorts)((NAME(twos))*codes << 8) >> 8);
        const NAME(twos) odd = (NAME(twos))((shorts)*codes >> 8);
        s->all += NAME(word_pairs)(even, NAME(four)(x)) + NAME(word_pairs)(odd, NAME(four)(x + 4));
        SUM_NOW(s->all);
        return;
    }
    UNROLL for (int low = 0; low < 2; low++, x += GROUP_INPUTS) {
        NAME(twos) sum = NAME(byte_pairs)(codes[0], NAME(four)(x));
        UNROLL for (int i = 1; i < count; i++)
            sum += NAME(byte_pairs)(codes[i], NAME(four)(x + 4 * i));
        s->all += NAME(word_pairs)(sum, low ? 0x00010001 : 0x01000100);
        SUM_NOW(s->all);
    }
}

INLINE ints NAME(sum_of)(struct NAME(sums) s) { return s.all; }
#endif
