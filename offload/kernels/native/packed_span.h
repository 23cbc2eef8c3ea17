/*
 * Reading packed keys and values, block by block; included once per level, by attend.h. The layout is in types.h.
 *
 * Decoded, they are the bf16 of a block in a block's order, so all sums have the bits that they have over plain blocks.
 */
typedef uint8_t NAME(bytes) __attribute__((vector_size(32)));
typedef uint16_t NAME(words) __attribute__((vector_size(32)));
typedef NAME(bytes) NAME(bytes_at) __attribute__((aligned(1), may_alias));

/* Store the words of low and high bytes: those of the first 8 bytes of each 16, then those of the others. */
INLINE void NAME(interleave)(NAME(bytes) low, NAME(bytes) high, char *to) {
#if HAS_MAX && LANES >= 8
    _mm256_storeu_si256((__m256i *)to, _mm256_unpacklo_epi8((__m256i)low, (__m256i)high));
    _mm256_storeu_si256((__m256i *)to + 1, _mm256_unpackhi_epi8((__m256i)low, (__m256i)high));
#elif HAS_MAX
    uint8x16_t lows[2], highs[2];
    memcpy(lows, &low, 32), memcpy(highs, &high, 32);
    uint8x16_t words[4] = {vzip1q_u8(lows[0], highs[0]), vzip1q_u8(lows[1], highs[1]),
                           vzip2q_u8(lows[0], highs[0]), vzip2q_u8(lows[1], highs[1])};
    memcpy(to, words, 64);
#else
    for (int i = 0; i < 32; i++) {
        char *word = to + i / 8 % 2 * 32 + i / 16 * 16 + i % 8 * 2;
        word[0] = (char)low[i], word[1] = (char)high[i];
    }
#endif
}

/*
 * Decode one column of two lines that follow each other, to 64 bytes each, `row` bytes apart. `high` and `low` are at the
 * column in planes A and B; `bases` at its bases, or for keys at those of the lines.
 */
INLINE void NAME(decode_lines)(const int are_keys, const char *high, const char *low, const char *bases, char *to,
                               int64_t row) {
    const NAME(bytes) digits = *(const NAME(bytes_at) *)low;
    UNROLL for (int odd = 0; odd < 2; odd++) {
        const NAME(bytes) a = *(const NAME(bytes_at) *)(high + 64 * odd);
        NAME(bytes) base;
        if (are_keys) {
            uint16_t both;
            memcpy(&both, bases + 2 * odd, 2);
            base = (NAME(bytes))(both - (NAME(words)){0});
        } else {
            base = *(const NAME(bytes_at) *)bases;
        }
        const NAME(bytes) b = odd ? (NAME(bytes))((NAME(words))digits >> 4) : digits;
        NAME(interleave)((b & 0x0f) | ((a + a) & 0xf0), (a & 0x87) + base, to + row * odd);
    }
}

/* The packed run of a block of the order of reading, NULL if it is not packed, and its number among the run's blocks. */
struct NAME(packed) {
    const char *run;
    int number;
};

INLINE struct NAME(packed) NAME(packed_at)(const struct attention *a, int head, int64_t index) {
    const char *run = a->quantized && is_packed(a->kv_format) ? NAME(group_of)(a, head, index) : NULL;
    return (struct NAME(packed)){run, run ? ~a->table[head * a->table_stride + index] % (RUN / BLOCK) : 0};
}

/* Set the numbers of a block that are stored apart, of its keys (0) or values (1). */
INLINE void NAME(set_patches)(struct NAME(packed) s, int64_t dim, int which, char *block) {
    struct patches p = patches_of(s.run, dim, s.number / 2, which);
    for (int i = 0; i < p.count; i++)
        if (p.first[i].at / (BLOCK * dim) == s.number % 2)
            ((uint16_t *)block)[p.first[i].at % (BLOCK * dim)] = p.first[i].value;
}

/* Decode the keys of a packed block. */
NOINLINE static void NAME(unpack_keys_of_block)(const struct format *f, int64_t dim, struct NAME(packed) s, char *to) {
    const int64_t column = s.number % 2 * 32;
    struct planes p = planes_at(s.run, dim, s.number / 2, 0, f);
    for (int64_t line = 0; line < dim / 2; line += 2)
        NAME(decode_lines)(1, p.high + 64 * line + column, p.low + p.low_step * (line / 2) + column, s.run + 2 * line,
                           to + 64 * line, 64);
    NAME(set_patches)(s, dim, 0, to);
}

/* Decode its values: of 32 dimensions, 8 lines of two columns. */
NOINLINE static void NAME(unpack_values_of_block)(const struct format *f, int64_t dim, struct NAME(packed) s, char *to) {
    for (int64_t d = 0; d < dim; d += 32) {
        const char *bases = s.run + dim + 2 * d;
        struct planes p = planes_at(s.run, dim, s.number / 2, SPAN * (dim + d), f);
        p.high += s.number % 2 * 64 * BLOCK / 2, p.low += s.number % 2 * p.low_step * BLOCK / 4;
        for (int line = 0; line < BLOCK / 2; line += 2)
            UNROLL for (int column = 0; column < 64; column += 32)
                NAME(decode_lines)(0, p.high + 64 * line + column, p.low + p.low_step * (line / 2) + column,
                                   bases + column, to + 4 * dim * line + 4 * d + 2 * column, 4 * dim);
    }
    NAME(set_patches)(s, dim, 1, to);
}

/* Return the keys of a block, which are decoded to `to` if they are packed. */
INLINE const char *NAME(readable_keys)(const struct attention *a, int head, int64_t index, char *to) {
    struct NAME(packed) s = NAME(packed_at)(a, head, index);
    if (!s.run)
        return NAME(block)(a, head, index);
    NAME(unpack_keys_of_block)(a->kv_format, a->head_dim, s, to);
    return to;
}

TARGET static int NAME(unpack_runs)(const void *call, int64_t first, int64_t last) {
    const struct packing *p = call;
    const struct format f = {.bits = p->plane ? PLANE : PACKED};
    const int64_t half = 2 * BLOCK * p->head_dim;
    for (int64_t i = first; i < last; i++) {
        const int32_t *item = p->runs + i * (2 + RUN / BLOCK);
        const char *run = p->packed + item[0] * p->packed_stride + item[1] * run_bytes(p->head_dim);
        for (int j = 0; j < RUN / BLOCK; j++) {
            char *block = p->kv + item[0] * p->head_stride + 2 * item[2 + j] * half;
            NAME(unpack_keys_of_block)(&f, p->head_dim, (struct NAME(packed)){run, j}, block);
            NAME(unpack_values_of_block)(&f, p->head_dim, (struct NAME(packed)){run, j}, block + half);
        }
    }
    return 0;
}

TARGET static int NAME(pack_or_unpack_runs)(const void *call) {
    const struct packing *p = call;
    return run_rows(p->fits ? pack_runs : NAME(unpack_runs), p, p->count);
}
