/*
 * Packing keys and values without loss; the layout is in types.h. One version for all levels: a run is packed once, when
 * all of its tokens are there. Unpacking is in packed_span.h.
 */
static inline int is_packed(const struct format *f) { return f->bits == PACKED || f->bits == PLANE; }

static inline int64_t packed_header(int64_t dim) { return (3 * dim + 2 * RUN_SPANS + 4 * PATCHES + 63) / 64 * 64; }

static inline int64_t run_bytes(int64_t dim) { return packed_header(dim) + 3 * RUN * dim; }

/* Where lines of a run begin in the planes; two lines share `low_step` bytes of B, 0 where all of them read the same. */
struct planes {
    const char *high, *low;
    int64_t low_step;
};

/* The low bits of two lines of which nothing but plane A is there: in the middle of what they could be. */
static const char half_steps[64] __attribute__((aligned(64))) = {
#define EIGHT (char)0x88, (char)0x88, (char)0x88, (char)0x88, (char)0x88, (char)0x88, (char)0x88, (char)0x88
    EIGHT, EIGHT, EIGHT, EIGHT, EIGHT, EIGHT, EIGHT, EIGHT
#undef EIGHT
};

/* Return the lines that begin `offset` bytes behind the start of a span in plane A. */
static inline struct planes planes_at(const char *run, int64_t dim, int span, int64_t offset, const struct format *f) {
    const char *planes = run + packed_header(dim);
    int64_t at = 2 * SPAN * dim * span + offset;
    if (f->bits != PACKED)
        return (struct planes){planes + at, half_steps, 0};
    return (struct planes){planes + at, planes + 2 * RUN * dim + at / 2, 64};
}

/* A number that is stored apart: its index among the keys or values of the span's two blocks. */
struct patch {
    uint16_t at, value;
};

struct patches {
    const struct patch *first;
    int count;
};

/* Return the patches of a span's keys (which: 0) or values (1). */
static inline struct patches patches_of(const char *run, int64_t dim, int span, int which) {
    const uint8_t *ends = (const uint8_t *)run + 3 * dim;
    int list = 2 * span + which, start = list ? ends[list - 1] : 0;
    return (struct patches){(const struct patch *)(ends + 2 * RUN_SPANS) + start, ends[list] - start};
}

/* Where the code of one value is: its byte of plane A, and its bits of plane B. */
struct code_place {
    int64_t high, low;
    int shift;
};

/* Of the word `w` of the 32 of one column (0 or 1) in a line. */
static inline struct code_place place_in_line(int64_t line, int column, int w) {
    int64_t byte = 32 * column + (w / 8 % 2 * 16 | w / 16 * 8 | w % 8);
    return (struct code_place){64 * line + byte, line / 2 * 64 + byte, (int)(line % 2) * 4};
}

/* Index of token `t` of a run in dimension `d` among the keys or values of its block. */
static inline int64_t word_index(int64_t dim, int which, int t, int d) {
    return which ? value_index(t % BLOCK, d, dim, 0) : key_index(t % BLOCK, d, 0);
}

/* A run while it is packed: its blocks' keys (0) and values (1), and the memory of the packed run. */
struct run {
    const struct packing *call;
    uint16_t *words[2][RUN / BLOCK];
    char *to;
    int counts[2 * RUN_SPANS], lost; /* of patches; for those that are lost there is no room */
    struct patch patches[2 * RUN_SPANS][PATCHES];
    uint16_t bases[2][8 * MAX_HEAD_DIM]; /* exponents: 8 for each line of the keys, one for each word of the values */
};

/* 8 words, which are as near in the blocks, and their bytes of a plane. */
typedef uint16_t words8 __attribute__((vector_size(16), aligned(2), may_alias));
typedef uint8_t bytes8 __attribute__((vector_size(8), aligned(1), may_alias));

/* Where a column of a line is, 4 times 8 words: in the blocks, in planes A and B; and the exponents counted from. */
struct column {
    words8 *words;
    char *high, *low;
    int shift;
    words8 *bases;
    int each; /* eights of bases: 1, or 0 where all are the same */
};

/* Column `i` of a run's keys (which: 0) or values (1), of RUN * head_dim / 32. */
static inline struct column column_at(struct run *r, int which, int64_t i) {
    const int64_t dim = r->call->head_dim;
    int64_t half = i % 2, l = i / 2 % (dim / 2), span = i / dim;
    struct code_place at = place_in_line(span * dim + which * (dim / 2) + l, (int)half, 0);
    int64_t pair = l % BLOCK, from = l / BLOCK * 32 + half * BLOCK; /* of values: tokens, and the first dimension */
    uint16_t *words = which ? r->words[1][2 * span + pair / 8] + (pair % 8 * dim + from) * 2
                            : r->words[0][2 * span + half] + 32 * l;
    char *planes = r->to + packed_header(dim);
    return (struct column){(words8 *)words, planes + at.high, planes + 2 * RUN * dim + at.low, at.shift,
                           (words8 *)(r->bases[which] + (which ? 2 * from : 8 * l)), which};
}

/* Where the bytes of 8 words of a column are in a plane: see place_in_line. */
static inline bytes8 *eight_bytes(char *column, int part) {
    return (bytes8 *)(column + part % 2 * 16 + part / 2 * 8);
}

/* Where the base of a dimension is among a run's, in eights: keys' words are of two in turn, values' of each twice. */
static inline uint16_t *base_of(struct run *r, int which, int d) {
    return r->bases[which] + (which ? 2 * d : d / 2 * 8 + d % 2);
}

/* Set the bases of a dimension, of all words that have it. */
static inline void set_base(struct run *r, int which, int d, int base) {
    for (int i = 0; i < (which ? 2 : 4); i++)
        base_of(r, which, d)[which ? i : 2 * i] = (uint16_t)base;
}

static inline int exponent(uint16_t x) { return x >> 7 & 255; }

/*
 * Return the even exponent from which on 16 exponents are those of the most of a channel's values, the largest one, and set
 * `count` to how many these are.
 */
static int choose_base(const struct run *r, int which, int d, int *count) {
    int counts[256] = {0}, best = 0, sum = 0;
    for (int t = 0; t < RUN; t++)
        counts[exponent(r->words[which][t / BLOCK][word_index(r->call->head_dim, which, t, d)])]++;
    for (int e = 0; e < 16; e++)
        sum += counts[e];
    *count = sum;
    for (int base = 2; base <= 240; base += 2) { /* exponent 255 is of no number */
        sum += counts[base + 14] + (base < 240 ? counts[base + 15] : 0) - counts[base - 2] - counts[base - 1];
        if (sum >= *count)
            *count = sum, best = base;
    }
    return best;
}

/* Keep the values of one channel that are not coded as patches. */
static void patch_channel(struct run *r, int which, int d) {
    const int64_t dim = r->call->head_dim;
    for (int t = 0; t < RUN; t++) {
        uint16_t x = r->words[which][t / BLOCK][word_index(dim, which, t, d)];
        int code = exponent(x) - *base_of(r, which, d), list = t / SPAN * 2 + which;
        if (code >= 0 && code <= 15 && exponent(x) < 255)
            continue;
        if (r->counts[list] == PATCHES) {
            r->lost = 1;
            continue;
        }
        int64_t at = t / BLOCK % 2 * BLOCK * dim + word_index(dim, which, t, d);
        r->patches[list][r->counts[list]++] = (struct patch){(uint16_t)at, x};
    }
}

/* Choose the bases of the keys or values, and store them. */
static void choose_bases(struct run *r, int which) {
    const int64_t dim = r->call->head_dim;
    for (int d = 0; d < dim; d++) {
        int count, base = choose_base(r, which, d, &count);
        set_base(r, which, d, base);
        if (count < RUN)
            patch_channel(r, which, d);
        char *bases = which ? r->to + dim + d / 32 * 64 : r->to + d;
        for (int odd = 0; odd <= which; odd++) /* of values as the bytes of a line lie, for both tokens of a pair */
            bases[which ? place_in_line(0, d / BLOCK % 2, d % BLOCK * 2 + odd).high : 0] = (char)(base / 2);
    }
}

/* Write the codes of the keys or values; those of patches are 0. */
static void write_codes(struct run *r, int which) {
    for (int64_t i = 0; i < RUN * r->call->head_dim / 32; i++) {
        struct column c = column_at(r, which, i);
        for (int part = 0; part < 4; part++) {
            words8 x = c.words[part], code = (x >> 7 & 255) - c.bases[part * c.each];
            words8 is_coded = (words8)(code < 16) & (words8)((x >> 7 & 255) < 255);
            words8 high = (x >> 8 & 128) | (code & 1) << 6 | (x >> 4 & 7) << 3 | code >> 1;
            *eight_bytes(c.high, part) = __builtin_convertvector(high & is_coded, bytes8);
            *eight_bytes(c.low, part) |= __builtin_convertvector((x & 15 & is_coded) << c.shift, bytes8);
        }
    }
}

/* Store the patches, one list after the other, as long as there is room. */
static void store_patches(struct run *r) {
    uint8_t *ends = (uint8_t *)r->to + 3 * r->call->head_dim;
    struct patch *to = (struct patch *)(ends + 2 * RUN_SPANS);
    int total = 0;
    for (int list = 0; list < 2 * RUN_SPANS; list++) {
        int count = r->counts[list] < PATCHES - total ? r->counts[list] : PATCHES - total;
        memcpy(to + total, r->patches[list], count * sizeof *to);
        r->lost |= count < r->counts[list];
        total += count;
        ends[list] = (uint8_t)total;
    }
}

/* Pack a run; return 0 if it has too many patches: the others' values are lost, so plane A is a draft and no more. */
static int pack_run(struct run *r) {
    memset(r->counts, 0, sizeof r->counts);
    memset(r->to, 0, run_bytes(r->call->head_dim));
    r->lost = 0;
    for (int which = 0; which < 2; which++) {
        choose_bases(r, which);
        write_codes(r, which);
    }
    store_patches(r);
    return !r->lost;
}

static int pack_runs(const void *call, int64_t first, int64_t last) {
    const struct packing *p = call;
    const int64_t half = 2 * BLOCK * p->head_dim;
    for (int64_t i = first; i < last; i++) {
        const int32_t *item = p->runs + i * (2 + RUN / BLOCK);
        struct run r = {.call = p, .to = p->packed + item[0] * p->packed_stride + item[1] * run_bytes(p->head_dim)};
        for (int j = 0; j < RUN / BLOCK; j++)
            for (int which = 0; which < 2; which++)
                r.words[which][j] = (uint16_t *)(p->kv + item[0] * p->head_stride + (2 * item[2 + j] + which) * half);
        p->fits[i] = (uint8_t)pack_run(&r);
    }
    return 0;
}
