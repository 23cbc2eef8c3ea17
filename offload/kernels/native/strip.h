/* Reading strips of packed keys and values; included once per level, by tile.h. The layout is in types.h. */
typedef uint8_t NAME(bytes) __attribute__((vector_size(4 * LANES)));
typedef uint16_t NAME(words) __attribute__((vector_size(4 * LANES)));
typedef NAME(bytes) NAME(bytes_at) __attribute__((aligned(1), may_alias));
typedef uint16_t NAME(word_at) __attribute__((aligned(1), may_alias));

/* What of a line of 64 values is decoded at once: with LANES of 16 both of its columns, else one. */
enum { NAME(LINE_COLUMNS) = LANES / 8 };

/* Write words of low and high bytes in order: those of the first 8 bytes of each 16, and those of the others. */
INLINE void NAME(interleave)(NAME(bytes) low, NAME(bytes) high, ints *first, ints *second) {
#if HAS_MAX && LANES == 16
    *first = (ints)_mm512_unpacklo_epi8((__m512i)low, (__m512i)high);
    *second = (ints)_mm512_unpackhi_epi8((__m512i)low, (__m512i)high);
#elif HAS_MAX
    *first = (ints)_mm256_unpacklo_epi8((__m256i)low, (__m256i)high);
    *second = (ints)_mm256_unpackhi_epi8((__m256i)low, (__m256i)high);
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

/*
 * Decode line `line`, whose lowest bit is `odd`, a constant, from its column `column` on: the columns' pairs 0 to 7 and
 * 8 to 15.
 */
INLINE void NAME(decode)(const int which, const int odd, const struct strip *s, int line, int column, ints *first,
                         ints *second) {
    const int64_t from = 32 * column;
    NAME(bytes) high = *(const NAME(bytes_at) *)(s->high + 64 * line + from);
    NAME(bytes) low = *(const NAME(bytes_at) *)(s->low + line / 2 * s->low_step + from);
    NAME(bytes) bases;
    if (which == KEYS)
        bases = (NAME(bytes))(((const NAME(word_at) *)s->bases)[line] - (NAME(words)){0});
    else
        bases = *(const NAME(bytes_at) *)(s->bases + from);
    if (odd)
        low = (NAME(bytes))((NAME(words))low >> 4);
    NAME(interleave)(NAME(join_nibbles)(low, high + high), (high & 0x87) + bases, first, second);
}

/* Store 8 lanes, those of a column of what `decode` has written. */
INLINE void NAME(store_column)(ints x, const int column, char *to) {
#if HAS_MAX && LANES == 16
    _mm256_storeu_si256((__m256i *)to, _mm512_extracti64x4_epi64((__m512i)x, column));
#else
    memcpy(to, (const char *)&x + 32 * column, 32);
#endif
}

/* Load 8 lanes of each column of what `decode` has written. */
INLINE vec NAME(load_columns)(const float *first, const float *second) {
#if HAS_MAX && LANES == 16
    __m512i x = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)first));
    return (vec)_mm512_inserti64x4(x, _mm256_loadu_si256((const __m256i *)second), 1);
#else
    vec x;
    memcpy(&x, first, 32);
    if (LANES == 16)
        memcpy((float *)&x + 8, second, 32);
    return x;
#endif
}

/* Prefetch a line, and its part of plane B, into the L2 cache. */
INLINE void NAME(prefetch_line)(const struct strip *s, int line) {
    __builtin_prefetch(s->high + 64 * line, 0, 2);
    if (line % 2 == 0)
        __builtin_prefetch(s->low + line / 2 * s->low_step, 0, 2);
}

/* Decode a line to rows of its two columns. */
INLINE void NAME(unpack_line)(const int which, const int odd, const struct strip *s, int line, char *to, char *second) {
    UNROLL for (int column = 0; column < 2; column += NAME(LINE_COLUMNS)) {
        ints pairs[2];
        NAME(decode)(which, odd, s, line, column, pairs, pairs + 1);
        UNROLL for (int h = 0; h < 2; h++)
            UNROLL for (int c = 0; c < NAME(LINE_COLUMNS); c++)
                NAME(store_column)(pairs[h], c, (column + c ? second : to) + 32 * h);
    }
}

/*
 * Decode a strip to its columns, whose rows are `row` bytes apart: those of two blocks of keys, or 16 dimensions each of
 * the values, of which `second` is the next block.
 */
INLINE void NAME(unpack_strip)(const int which, const struct strip *s, const struct strip *next, int lines, char *to,
                               char *second, int64_t row) {
    for (int line = 0; line < lines; line += 2)
        UNROLL for (int odd = 0; odd < 2; odd++) {
            char *block = line < BLOCK / 2 ? to : second - BLOCK / 2 * row;
            int64_t at = (line + odd) * row;
            NAME(prefetch_line)(next, line + odd);
            if (which == KEYS)
                NAME(unpack_line)(which, odd, s, line + odd, to + at, second + at);
            else
                NAME(unpack_line)(which, odd, s, line + odd, block + at, block + at + 4 * BLOCK);
        }
}
