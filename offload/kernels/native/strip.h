/* Reading strips of packed keys and values; included once per level, by tile.h. The layout is in types.h. */
typedef uint8_t NAME(bytes) __attribute__((vector_size(4 * LANES)));
typedef uint16_t NAME(words) __attribute__((vector_size(4 * LANES)));
typedef NAME(bytes) NAME(bytes_at) __attribute__((aligned(1), may_alias));
typedef uint16_t NAME(word_at) __attribute__((aligned(1), may_alias));

/* Columns of a line that are decoded at once, and vectors that half of a column takes. */
enum { NAME(LINE_COLUMNS) = LANES == 16 ? 2 : 1, NAME(HALF_VECTORS) = LANES == 4 ? 2 : 1 };

/* Write words of low and high bytes in order: those of the first 8 bytes of each 16, and those of the others. */
INLINE void NAME(interleave)(NAME(bytes) low, NAME(bytes) high, ints *first, ints *second) {
#if HAS_MAX && LANES == 16
    *first = (ints)_mm512_unpacklo_epi8((__m512i)low, (__m512i)high);
    *second = (ints)_mm512_unpackhi_epi8((__m512i)low, (__m512i)high);
#elif HAS_MAX && LANES == 8
    *first = (ints)_mm256_unpacklo_epi8((__m256i)low, (__m256i)high);
    *second = (ints)_mm256_unpackhi_epi8((__m256i)low, (__m256i)high);
#elif HAS_MAX
    *first = (ints)vzip1q_u8((uint8x16_t)low, (uint8x16_t)high);
    *second = (ints)vzip2q_u8((uint8x16_t)low, (uint8x16_t)high);
#else
    uint8_t bytes[2][4 * LANES];
    for (int i = 0; i < 4 * LANES; i++) {
        uint8_t *to = &bytes[i / 8 % 2][i / 16 * 16 + i % 8 * 2];
        to[0] = low[i], to[1] = high[i];
    }
    memcpy(first, bytes[0], sizeof *first);
    memcpy(second, bytes[1], sizeof *second);
#endif
}

/* Take the low 4 bits of each byte of one vector, and the others of the other. */
INLINE NAME(bytes) NAME(join_nibbles)(NAME(bytes) low, NAME(bytes) high) {
#if HAS_MAX && LANES == 16
    return (NAME(bytes))_mm512_ternarylogic_epi32(_mm512_set1_epi8(15), (__m512i)low, (__m512i)high, 0xca);
#else
    return (low & 0x0f) | (high & 0xf0);
#endif
}

/* Where two lines of a strip are read, from one column on, and how far away those are that are to be prefetched. */
struct NAME(walk) {
    const char *high, *low, *bases;
    int64_t low_step, high_ahead, low_ahead;
};

INLINE struct NAME(walk) NAME(walk_from)(const int which, const struct strip *s, const struct strip *next, int column) {
    const int64_t from = 32 * column;
    return (struct NAME(walk)){s->high + from, s->low + from, s->bases + (which == VALUES ? from : 0), s->low_step,
                               next->high - s->high + from, next->low - s->low};
}

/* Go on to the next two lines. */
INLINE void NAME(step_on)(const int which, struct NAME(walk) *w) {
    w->high += 128, w->low += w->low_step, w->bases += which == KEYS ? 4 : 0;
}

/* Prefetch what a later walk reads into the L2 cache; of two walks over a column each, each one prefetches one line. */
INLINE void NAME(prefetch_lines)(const struct NAME(walk) *w) {
    __builtin_prefetch(w->high + w->high_ahead, 0, 2);
    if (LANES == 16)
        __builtin_prefetch(w->high + w->high_ahead + 64, 0, 2);
    __builtin_prefetch(w->low + w->low_ahead, 0, 2);
}

/*
 * Decode the first of the two lines, or the other (odd, a constant): the columns' pairs 0 to 7 and 8 to 15. The columns
 * are both with LANES of 16, else one.
 */
INLINE void NAME(decode)(const int which, const int odd, const struct NAME(walk) *w, ints *first, ints *second) {
    UNROLL for (int i = 0; i < NAME(HALF_VECTORS); i++) {
        NAME(bytes) high = ((const NAME(bytes_at) *)(w->high + 64 * odd))[i], low = ((const NAME(bytes_at) *)w->low)[i];
        NAME(bytes) bases;
        if (which == KEYS)
            bases = (NAME(bytes))(((const NAME(word_at) *)w->bases)[odd] - (NAME(words)){0});
        else
            bases = ((const NAME(bytes_at) *)w->bases)[i];
        if (odd)
            low = (NAME(bytes))((NAME(words))low >> 4);
        NAME(interleave)(NAME(join_nibbles)(low, high + high), (high & 0x87) + bases, first + i, second + i);
    }
}

/* Store those 8 lanes of a vector that are of a column, of what `decode` has written; or all lanes if they are fewer. */
INLINE void NAME(store_column)(ints x, const int column, char *to) {
#if HAS_MAX && LANES == 16
    __m512i both = (__m512i)x;
    _mm256_storeu_si256((__m256i *)to, column ? _mm512_extracti64x4_epi64(both, 1) : _mm512_castsi512_si256(both));
#else
    memcpy(to, (const char *)&x + 32 * column, 32 / NAME(HALF_VECTORS));
#endif
}

#if DOTS
/* Load 8 lanes of each column of what `decode` has written. */
INLINE vec NAME(load_columns)(const float *first, const float *second) {
#if HAS_MAX && LANES == 16
    __m512i x = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)first));
    return (vec)_mm512_inserti64x4(x, _mm256_loadu_si256((const __m256i *)second), 1);
#else
    vec x;
    memcpy(&x, first, LANES < 8 ? 16 : 32);
    if (LANES == 16)
        memcpy((float *)&x + 8, second, 32);
    return x;
#endif
}
#endif

/* Decode one column of the first line, or of the other, to 64 bytes; the walk is from that column on. */
INLINE void NAME(decode_column)(const int which, const int odd, const struct NAME(walk) *w, char *to) {
#if HAS_MAX && LANES == 16
    __m256i high = _mm256_loadu_si256((const __m256i *)(w->high + 64 * odd));
    __m256i low = _mm256_loadu_si256((const __m256i *)w->low);
    __m256i bases = which == KEYS ? _mm256_set1_epi16((short)((const NAME(word_at) *)w->bases)[odd])
                                  : _mm256_loadu_si256((const __m256i *)w->bases);
    if (odd)
        low = _mm256_srli_epi16(low, 4);
    low = _mm256_ternarylogic_epi32(_mm256_set1_epi8(15), low, _mm256_add_epi8(high, high), 0xca);
    high = _mm256_add_epi8(_mm256_and_si256(high, _mm256_set1_epi8((char)0x87)), bases);
    _mm256_storeu_si256((__m256i *)to, _mm256_unpacklo_epi8(low, high));
    _mm256_storeu_si256((__m256i *)(to + 32), _mm256_unpackhi_epi8(low, high));
#else
    ints pairs[2][NAME(HALF_VECTORS)];
    NAME(decode)(which, odd, w, pairs[0], pairs[1]);
    UNROLL for (int h = 0; h < 2; h++)
        UNROLL for (int i = 0; i < NAME(HALF_VECTORS); i++)
            NAME(store_column)(pairs[h][i], 0, to + 32 * h + 16 * i);
#endif
}

/* Decode one column of a strip of keys, those of one block. */
INLINE void NAME(unpack_column)(const struct strip *s, const struct strip *next, int column, int lines, char *to) {
    struct NAME(walk) w = NAME(walk_from)(KEYS, s, next, column);
    for (int line = 0; line < lines; line += 2, NAME(step_on)(KEYS, &w), to += 128) {
        NAME(prefetch_lines)(&w);
        UNROLL for (int odd = 0; odd < 2; odd++)
            NAME(decode_column)(KEYS, odd, &w, to + 64 * odd);
    }
}

/*
 * Decode a strip to its columns, whose rows are `row` bytes apart: those of two blocks of keys, or 16 dimensions each of
 * the values, of which `second` is the next block.
 */
INLINE void NAME(unpack_strip)(const int which, const struct strip *s, const struct strip *next, int lines, char *to,
                               char *second, int64_t row) {
    for (int column = 0; column < 2; column += NAME(LINE_COLUMNS)) {
        struct NAME(walk) w = NAME(walk_from)(which, s, next, column);
        char *at = which == VALUES ? to + 4 * BLOCK * column : column ? second : to;
        const int64_t other = which == VALUES ? 4 * BLOCK : second - to; /* from one column to the other */
        for (int line = 0; line < lines; line += 2, NAME(step_on)(which, &w)) {
            if (which == VALUES && line == BLOCK / 2)
                at += second - to - BLOCK / 2 * row;
            NAME(prefetch_lines)(&w);
            UNROLL for (int odd = 0; odd < 2; odd++) {
                ints pairs[2][NAME(HALF_VECTORS)];
                NAME(decode)(which, odd, &w, pairs[0], pairs[1]);
                UNROLL for (int h = 0; h < 2; h++)
                    UNROLL for (int i = 0; i < NAME(HALF_VECTORS); i++)
                        UNROLL for (int c = 0; c < NAME(LINE_COLUMNS); c++)
                            NAME(store_column)(pairs[h][i], c, at + c * other + 32 * h + 16 * i);
                at += row;
            }
        }
    }
}
