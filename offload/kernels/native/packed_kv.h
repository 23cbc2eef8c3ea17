/*
 * Packing keys and values without loss, and back; the layout is in types.h. One version for all levels: a run is packed
 * once, when all of its tokens are there.
 */
static inline int is_packed(const struct format *f) { return f->bits == PACKED || f->bits == PLANE; }

static inline int64_t packed_header(int64_t dim) { return (3 * dim + 2 * RUN_SPANS + 4 * PATCHES + 63) / 64 * 64; }

static inline int64_t run_bytes(int64_t dim) { return packed_header(dim) + 3 * RUN * dim; }

/* One line after the other of 64 values in the order of the planes, which share the bytes of their bases. */
struct strip {
    const char *high, *low, *bases;
    int64_t low_step; /* bytes of `low` for two lines; 0: all lines read the same ones */
};

enum { KEYS = 1, VALUES = 2 }; /* of which a strip is: each line has bases of its own, or all have the same ones */

/* Both halves of the low bits of a line of which nothing but plane A is read: in the middle of what they could be. */
static const char half_steps[64] __attribute__((aligned(64))) = {
#define EIGHT (char)0x88, (char)0x88, (char)0x88, (char)0x88, (char)0x88, (char)0x88, (char)0x88, (char)0x88
    EIGHT, EIGHT, EIGHT, EIGHT, EIGHT, EIGHT, EIGHT, EIGHT
#undef EIGHT
};

/* Return the strip that begins `offset` bytes behind the start of a span in plane A. */
static inline struct strip strip_at(const char *run, int64_t dim, int span, int64_t offset, const char *bases,
                                    const struct format *f) {
    const char *planes = run + packed_header(dim);
    int64_t at = 2 * SPAN * dim * span + offset;
    if (f->bits == PLANE)
        return (struct strip){planes + at, half_steps, bases, 0};
    return (struct strip){planes + at, planes + 2 * RUN * dim + at / 2, bases, 64};
}

/* The keys of a span of a run: dim / 2 lines, a line of both blocks' tokens in two dimensions. */
static inline struct strip key_strip(const char *run, int64_t dim, int span, const struct format *f) {
    return strip_at(run, dim, span, 0, run, f);
}

/* Its values in 32 dimensions: 16 lines, of two tokens each. */
static inline struct strip value_strip(const char *run, int64_t dim, int span, int number, const struct format *f) {
    return strip_at(run, dim, span, SPAN * dim + 64 * BLOCK * number, run + dim + 64 * number, f);
}

/* A value that a strip does not have: its index among the keys or values of the span's two blocks. */
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

/* Of token `t` of a run in dimension `d` of the keys (which: 0) or values (1), counted from the start of each plane. */
static inline struct code_place code_place(int64_t dim, int which, int t, int d) {
    int64_t line = t / SPAN * dim + (which ? dim / 2 + d / 32 * BLOCK + t % SPAN / 2 : d / 2);
    int block = t / BLOCK % 2;
    return which ? place_in_line(line, d / BLOCK % 2, d % BLOCK * 2 + t % 2)
                 : place_in_line(line, block, t % BLOCK * 2 + d % 2);
}

/* Index of token `t` of a run in dimension `d` among the keys or values of its block. */
static inline int64_t word_index(int64_t dim, int which, int t, int d) {
    return which ? value_index(t % BLOCK, d, dim, 0) : key_index(t % BLOCK, d, 0);
}

/* A run while it is packed or unpacked: its blocks' keys (0) and values (1), and the memory of the packed run. */
struct run {
    const struct packing *call;
    uint16_t *words[2][RUN / BLOCK];
    char *to;
    int counts[2 * RUN_SPANS];
    struct patch patches[2 * RUN_SPANS][PATCHES];
};

static inline int exponent(uint16_t x) { return x >> 7 & 255; }

/* Return the even exponent from which on 16 exponents are those of the most of a channel's values; the largest one. */
static int choose_base(const uint16_t *x) {
    int least = 255, most = 0, counts[256] = {0}, best = 0, found = -1;
    for (int t = 0; t < RUN; t++) {
        least = exponent(x[t]) < least ? exponent(x[t]) : least;
        most = exponent(x[t]) > most ? exponent(x[t]) : most;
    }
    least = least & 254;
    if (most < 255 && most < least + 16)
        return least < 240 ? least : 240;
    for (int t = 0; t < RUN; t++)
        counts[exponent(x[t])]++;
    for (int base = 0; base <= 240; base += 2) {
        int sum = 0;
        for (int e = base; e < base + 16 && e < 255; e++)
            sum += counts[e];
        if (sum >= found)
            found = sum, best = base;
    }
    return best;
}

/* Pack one channel of the keys or values; return 0 if there are too many patches. */
static int pack_channel(struct run *r, int which, int d) {
    const int64_t dim = r->call->head_dim;
    char *planes = r->to + packed_header(dim);
    uint16_t x[RUN];
    for (int t = 0; t < RUN; t++)
        x[t] = r->words[which][t / BLOCK][word_index(dim, which, t, d)];
    int base = choose_base(x);
    if (which) { /* as the bytes of a line lie, for both tokens of a pair */
        char *bases = r->to + dim + d / 32 * 64;
        for (int odd = 0; odd < 2; odd++)
            bases[place_in_line(0, d / BLOCK % 2, d % BLOCK * 2 + odd).high] = (char)(base / 2);
    } else
        r->to[d] = (char)(base / 2);
    for (int t = 0; t < RUN; t++) {
        int code = exponent(x[t]) - base, list = t / SPAN * 2 + which;
        if (code < 0 || code > 15 || exponent(x[t]) == 255) {
            if (r->counts[list] == PATCHES)
                return 0;
            int64_t at = t / BLOCK % 2 * BLOCK * dim + word_index(dim, which, t, d);
            r->patches[list][r->counts[list]++] = (struct patch){(uint16_t)at, x[t]};
            continue;
        }
        struct code_place to = code_place(dim, which, t, d);
        planes[to.high] = (char)((x[t] >> 8 & 128) | (code & 1) << 6 | (x[t] >> 4 & 7) << 3 | code >> 1);
        planes[2 * RUN * dim + to.low] |= (char)((x[t] & 15) << to.shift);
    }
    return 1;
}

/* Store the patches, one list after the other; return 0 if they are too many. */
static int store_patches(struct run *r) {
    uint8_t *ends = (uint8_t *)r->to + 3 * r->call->head_dim;
    struct patch *to = (struct patch *)(ends + 2 * RUN_SPANS);
    int total = 0;
    for (int list = 0; list < 2 * RUN_SPANS; list++) {
        if (total + r->counts[list] > PATCHES)
            return 0;
        memcpy(to + total, r->patches[list], r->counts[list] * sizeof *to);
        total += r->counts[list];
        ends[list] = (uint8_t)total;
    }
    return 1;
}

static int pack_run(struct run *r) {
    int fits = 1;
    memset(r->counts, 0, sizeof r->counts);
    memset(r->to, 0, run_bytes(r->call->head_dim));
    for (int which = 0; which < 2; which++)
        for (int d = 0; d < r->call->head_dim && fits; d++)
            fits = pack_channel(r, which, d);
    return fits && store_patches(r);
}

/* Unpack one channel of a run, but for its patches. */
static void unpack_channel(const struct run *r, int which, int d) {
    const int64_t dim = r->call->head_dim;
    const char *planes = r->to + packed_header(dim);
    const uint8_t *bases = (const uint8_t *)r->to;
    int base = which ? bases[dim + d / 32 * 64 + place_in_line(0, d / BLOCK % 2, d % BLOCK * 2).high] : bases[d];
    for (int t = 0; t < RUN; t++) {
        struct code_place from = code_place(dim, which, t, d);
        int high = (uint8_t)planes[from.high];
        int low = r->call->plane ? 8 : planes[2 * RUN * dim + from.low] >> from.shift & 15;
        r->words[which][t / BLOCK][word_index(dim, which, t, d)] =
            (uint16_t)((high & 0x87) + base) << 8 | (high << 1 & 0xf0) | low;
    }
}

static void unpack_run(const struct run *r) {
    const int64_t dim = r->call->head_dim;
    for (int which = 0; which < 2; which++) {
        for (int d = 0; d < dim; d++)
            unpack_channel(r, which, d);
        for (int span = 0; span < RUN_SPANS; span++) {
            struct patches p = patches_of(r->to, dim, span, which);
            for (int i = 0; i < p.count; i++)
                r->words[which][2 * span + p.first[i].at / (BLOCK * dim)][p.first[i].at % (BLOCK * dim)] = p.first[i].value;
        }
    }
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
        if (p->fits)
            p->fits[i] = (uint8_t)pack_run(&r);
        else
            unpack_run(&r);
    }
    return 0;
}
