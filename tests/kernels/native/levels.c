/*
 * Calls every function of the kernel at one level, and writes the results or compares them with others, so that a level
 * of another processor can be tested under an emulator without Python: scripts/check_arm.sh.
 *
 *     levels write LEVEL > FILE    write the results
 *     levels check LEVEL < FILE    compare: what is rounded in one way has the same bits, sums are close
 *
 * Both also compare each row with the same row computed alone, by another number of threads: the same bits. Status 77:
 * this processor does not have the level.
 */
#include <stdio.h>

#include "../../../offload/kernels/native/kernel.c"

enum { KV_HEADS = 2, ROWS = 13, INPUTS = 1280, OUTPUTS = 40, MOST = 1 << 21 };

static int threads = 3;
int omp_get_max_threads(void) { return threads; }
void omp_set_num_threads(int count) { threads = count; }

static const struct level *level;
static int writes, wrong;
static double sum_error; /* of products whose factors this level rounds to bf16 */

static void fail(const char *what, const char *name, double found) {
    fprintf(stderr, "%s: %s: %s %g\n", level->name, name, what, found);
    wrong++;
}

/* Write floats, or compare them with those that were written. Both are finite. */
static void close_to(const char *name, const float *x, int64_t count, double most) {
    float *other = malloc(4 * count);
    double error = 0, size = 0;
    if (writes)
        fwrite(x, 4, count, stdout);
    else if (fread(other, 4, count, stdin) != (size_t)count)
        fail("there are too few results", name, 0);
    for (int64_t i = 0; i < count && !writes; i++)
        error += ((double)x[i] - other[i]) * ((double)x[i] - other[i]), size += (double)other[i] * other[i];
    if (!writes && !(sqrt(error) <= most * sqrt(size)))
        fail("is off by", name, sqrt(error / size));
    free(other);
}

static void same_bits(const char *name, const void *x, int64_t bytes) {
    char *other = malloc(bytes);
    int64_t at = 0;
    if (writes)
        fwrite(x, 1, bytes, stdout);
    else if (fread(other, 1, bytes, stdin) != (size_t)bytes)
        fail("there are too few results", name, 0);
    while (!writes && at < bytes && ((const char *)x)[at] == other[at])
        at++;
    if (!writes && at < bytes)
        fail("differs at byte", name, at);
    free(other);
}

static void same_row(const char *name, const void *row, const void *alone, int64_t bytes) {
    if (memcmp(row, alone, bytes))
        fail("a row depends on the others", name, 0);
}

static void *room(int64_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64); }

static uint32_t next_random(uint32_t *seed) {
    *seed = *seed * 1664525 + 1013904223;
    return *seed;
}

/* Return numbers between -scale and scale, or twice as large a few, in fp32 or bf16. */
static void *numbers(int64_t count, int wide, float scale, uint32_t seed) {
    char *x = room(count * (wide ? 4 : 2));
    for (int64_t i = 0; i < count; i++) {
        float value = scale * (float)(int32_t)next_random(&seed) * 0x1p-31f;
        write_element(x, i, next_random(&seed) >> 28 ? value : 2 * value, wide);
    }
    return x;
}

struct attention_case {
    const char *name;
    int bits; /* of quantised keys and values, the first ones; 0: all are as they are */
    int dim, group, seen, tokens, wide, window, nodes;
    float scale;
};

static const struct attention_case attentions[] = {
    {"bf16", 0, 64, 3, 530, 7, 0, 0, 0, 1},      {"fp32", 0, 80, 2, 530, 7, 1, 0, 0, 1},
    {"one query", 0, 128, 1, 1100, 1, 0, 0, 0, 1}, {"many rows", 0, 32, 4, 61, 33, 0, 0, 0, 1},
    {"large scores", 0, 64, 2, 200, 5, 0, 0, 0, 30}, {"window", 0, 64, 2, 1100, 5, 0, 100, 0, 1},
    {"tree", 0, 64, 3, 300, 9, 0, 0, 9, 1},      {"fp32 tree", 0, 48, 3, 300, 9, 1, 0, 9, 1},
    {"q8", 8, 80, 2, 530, 7, 0, 0, 0, 1},        {"q8 of fp32", 8, 48, 3, 530, 7, 1, 0, 0, 1},
    {"packed", PACKED, 64, 1, 530, 1, 0, 0, 0, 1}, {"packed, two rows", PACKED, 128, 2, 530, 1, 0, 0, 0, 1},
    {"packed, rows", PACKED, 64, 3, 530, 7, 0, 0, 0, 1}, {"plane", PLANE, 96, 2, 530, 3, 0, 0, 0, 1},
    {"packed tree", PACKED, 64, 2, 300, 9, 0, 0, 9, 1},
};

/* Quantise or pack the first blocks of each head, and let the table name them. Returns their memory. */
static char *quantize(const struct attention_case *c, const struct format *f, char *kv, int64_t head_stride, int32_t *table,
                      int blocks, int64_t *stride) {
    int each = kv_group_blocks(f), count = c->seen / BLOCK / each, items = 0;
    const int64_t bytes = kv_group_bytes(f, c->dim);
    const int64_t whole = f->bits == PLANE ? run_bytes(c->dim) : bytes; /* runs are packed with both planes */
    char *groups = memset(room(KV_HEADS * count * whole), 0, KV_HEADS * count * whole);
    int32_t *list = room(KV_HEADS * count * 4 * (2 + RUN / BLOCK)), *at = list;
    uint8_t *fits = memset(room(KV_HEADS * count), 1, KV_HEADS * count);
    *stride = count * bytes;
    for (int head = 0; head < KV_HEADS; head++)
        for (int g = 0; g < count; g++, items++) {
            *at++ = head;
            if (is_packed(f)) {
                *at++ = g;
                for (int b = 0; b < each; b++)
                    *at++ = g * each + b;
            } else {
                *at++ = g * each, *at++ = g;
            }
        }
    struct quantize q = {kv, groups, list, NULL, NULL, head_stride, *stride, items, c->dim, c->wide, f};
    struct packing p = {kv, groups, list, fits, head_stride, count * whole, items, c->dim, 0};
    wrong += is_packed(f) ? level->run[PACK_RUNS](&p) : level->run[QUANTIZE](&q);
    for (int i = 0; i < items; i++)
        memmove(groups + i * bytes, groups + i * whole, bytes);
    same_bits(c->name, groups, KV_HEADS * count * bytes);
    for (int i = 0; i < items; i++)
        for (int b = 0; b < each && fits[i]; b++)
            table[i / count * blocks + i % count * each + b] = ~(i % count * each + b);
    if (!is_packed(f)) {
        const int64_t size = (int64_t)items * SPAN * c->dim;
        q.keys = room(size * (c->wide ? 4 : 2)), q.values = room(size * (c->wide ? 4 : 2));
        wrong += level->run[QUANTIZE](&q);
        same_bits(c->name, q.keys, size * (c->wide ? 4 : 2)), same_bits(c->name, q.values, size * (c->wide ? 4 : 2));
    }
    return groups;
}

static void attend_case(const struct attention_case *c) {
    const int item = c->wide ? 4 : 2, heads = KV_HEADS * c->group, blocks = (c->seen + c->tokens + 127) / 128 * 8;
    const int64_t head_stride = (int64_t)blocks * 2 * BLOCK * c->dim * item, size = (int64_t)c->tokens * heads * c->dim;
    char *kv = numbers(KV_HEADS * head_stride / item, c->wide, 1, c->dim), *q = numbers(size, c->wide, c->scale, 2);
    int32_t *table = room(4 * KV_HEADS * blocks), parents[16];
    float *out = room(4 * size), *lse = room(4 * c->tokens * heads), *alone = room(4 * size);
    for (int i = 0; i < KV_HEADS * blocks; i++)
        table[i] = i % blocks;
    for (int i = 0; i < c->nodes; i++)
        parents[i] = (i - 1) / 2 - (i == 0);
    struct format f = {.bits = c->bits};
    struct attention a = {.q = q, .kv = kv, .table = table, .out = out, .lse = lse, .head_stride = head_stride,
                          .table_stride = blocks, .seen = c->seen, .causal = 1, .tokens = c->tokens, .kv_heads = KV_HEADS,
                          .group = c->group, .head_dim = c->dim, .wide = c->wide, .scale = 1 / sqrtf(c->dim),
                          .parents = c->nodes ? parents : NULL, .nodes = c->nodes, .window = c->window};
    if (c->bits)
        a.quantized = quantize(c, &f, kv, head_stride, table, blocks, &a.quantized_stride), a.kv_format = &f;
    wrong += level->run[ATTEND](&a);
    close_to(c->name, out, size, c->wide ? 3e-6 : sum_error * c->scale), close_to(c->name, lse, c->tokens * heads, sum_error);
    if (!c->nodes && !c->window && (!c->bits || !c->wide)) {
        float *sums = memset(room(4 * KV_HEADS * blocks * BLOCK), 0, 4 * KV_HEADS * blocks * BLOCK);
        struct observation o = {a, sums, blocks * BLOCK};
        wrong += level->run[OBSERVE](&o);
        close_to(c->name, sums, KV_HEADS * blocks * BLOCK, sum_error * c->scale * 3);
    }
    threads = 1;
    for (int t = c->nodes ? c->tokens - 1 : 0; t < c->tokens; t++) {
        a.q = q + (int64_t)t * heads * c->dim * item, a.out = alone, a.lse = NULL, a.tokens = 1;
        a.seen = c->nodes ? c->seen : c->seen + t;
        wrong += level->run[ATTEND](&a);
        same_row(c->name, out + (int64_t)t * heads * c->dim, alone, 4 * heads * c->dim);
    }
    threads = 3;
}

/* Return finite weights in panels of a format. */
static char *weights_of(const struct format *f) {
    int64_t panels = (OUTPUTS + BLOCK - 1) / BLOCK, blocks = INPUTS / GROUP_INPUTS / block_groups(f), bytes = block_bytes(f);
    char *weight = room(panels * blocks * bytes);
    uint32_t seed = f->bits;
    for (int64_t b = 0; b < panels * blocks; b++) {
        char *block = weight + b * bytes, *numbers = block + header_bytes(f);
        for (int64_t i = 0; i < bytes; i++)
            block[i] = (char)(next_random(&seed) >> 24);
        for (int i = 0; i < header_bytes(f) / 2 && f->nested; i++) /* fp16 below 2 */
            ((uint16_t *)block)[i] &= 0x9fff;
        for (int i = 0; i < header_bytes(f) / 4 && f->wide; i++)
            ((float *)block)[i] = (float)(int32_t)next_random(&seed) * 0x1p-31f;
        for (int g = 0; g < block_groups(f); g++, numbers += group_bytes(f)) {
            for (int i = 0; i < code_bytes(f->bits) && f->bits == FLOAT8; i++)
                numbers[i] &= (char)0xbf;
            for (int i = code_bytes(f->bits) / 2; i < group_bytes(f) / 2 && !f->nested; i++)
                ((uint16_t *)numbers)[i] &= 0x9fff;
        }
    }
    return weight;
}

static void linear_case(const char *name, const struct format *f, int wide, int wide_out) {
    const int item = wide ? 4 : 2, out_item = wide || wide_out ? 4 : 2;
    char *x = numbers(ROWS * INPUTS, wide, 1, 5), *onto = numbers(ROWS * OUTPUTS, wide, 1, 6);
    char *y = room(4 * ROWS * OUTPUTS), *alone = room(4 * OUTPUTS);
    float found[ROWS * OUTPUTS];
    struct linear l = {x, f ? weights_of(f) : numbers(INPUTS * (OUTPUTS + BLOCK), wide, 1, 7), numbers(OUTPUTS, 1, 1, 8), onto, y,
                       f, ROWS, INPUTS, OUTPUTS, OUTPUTS, wide, wide_out};
    wrong += level->run[LINEAR](&l);
    for (int i = 0; i < ROWS * OUTPUTS; i++)
        found[i] = read_element(y, i, out_item == 4);
    if (f && f->bits != FLOAT8)
        same_bits(name, found, sizeof found);
    else
        close_to(name, found, ROWS * OUTPUTS, out_item == 2 ? 2e-3 : 3e-6);
    threads = 1;
    for (int row = 0; row < ROWS; row++) {
        l.x = x + row * INPUTS * item, l.onto = onto + row * OUTPUTS * item, l.y = alone, l.rows = 1;
        wrong += level->run[LINEAR](&l);
        same_row(name, y + row * OUTPUTS * out_item, alone, OUTPUTS * out_item);
    }
    threads = 3;
    if (f) {
        int64_t ids[] = {3, 39, 17};
        struct unpack u = {l.weight, f, ids, y, 3, INPUTS, 1};
        float *rows = u.y = room(4 * 3 * INPUTS);
        wrong += level->run[UNPACK](&u);
        same_bits(name, rows, 4 * 3 * INPUTS);
    }
}

static void linear_cases(void) {
    static const struct format formats[] = {
        {4, 0, 0, 0, -8}, {4, 0, 1, 0, 0}, {4, 0, 0, 0, 1}, {5, 0, 1, 0, 0},      {8, 0, 0, 0, 0}, {4, 1, 1, 0, 0},
        {5, 1, 1, 0, 0},  {6, 1, 0, 0, -32}, {4, 0, 1, 4, 0}, {8, 0, 0, 2, 0}, {FLOAT8, 0, 0, 4, 0}, {4, 0, 0, 0, 2},
    };
    linear_case("bf16 linear", NULL, 0, 1), linear_case("fp32 linear", NULL, 1, 1), linear_case("narrow linear", NULL, 0, 0);
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        struct format f = formats[i];
        char name[64];
        snprintf(name, sizeof name, "linear of format %d", (int)i);
        for (int code = 0; code < 64; code++)
            f.levels[code] = narrow(f.base > 0 ? code % 16 * (f.base == 1 ? 15 : 1) - 12 : code % (1 << f.bits % 8) + f.base);
        linear_case(name, &f, 0, 1);
    }
}

/* Norms, the gate, scores of keys, storing tokens, and linear attention. */
static void row_cases(int wide) {
    enum { WIDTH = 96, DIM = 32, KEYS_SCORED = 600, COUNT = 9 };
    const double most = wide ? 3e-6 : 2e-3;
    float found[COUNT * WIDTH], scores[2 * (KEYS_SCORED + BLOCK)];
    char *y = room(4 * COUNT * WIDTH);
    struct norm n = {numbers(2 * COUNT * WIDTH, wide, 3, 9), numbers(WIDTH, wide, 1, 10), y, COUNT, WIDTH, 1, WIDTH, 1e-5f, wide};
    for (int gate = 0; gate < 2; gate++) {
        n.weight = gate ? NULL : n.weight;
        wrong += level->run[NORM](&n);
        for (int i = 0; i < COUNT * WIDTH; i++)
            found[i] = read_element(y, i, wide);
        close_to(gate ? "gate" : "norm", found, COUNT * WIDTH, most);
    }
    memset(scores, 0, sizeof scores);
    struct key_scores k = {numbers(2 * DIM, wide, 1, 11), numbers(2 * (KEYS_SCORED + BLOCK) * DIM, wide, 1, 12), scores,
                           (KEYS_SCORED + BLOCK) / BLOCK * BLOCK * DIM * (wide ? 4 : 2), KEYS_SCORED + BLOCK, KEYS_SCORED, 2, DIM, wide};
    wrong += level->run[SCORE_KEYS](&k);
    close_to("scores of keys", scores, sizeof scores / 4, 3e-6);
    char *stored = memset(room(4 * 4 * WIDTH * DIM), 0, 4 * 4 * WIDTH * DIM), *x = numbers(COUNT * WIDTH, wide, 1, 13);
    struct append a = {x, x, x, x, x, y, stored, NULL, WIDTH, WIDTH, WIDTH, 0, 3, COUNT, 1, 1, 1, DIM, wide};
    wrong += level->run[APPEND](&a);
    same_bits("stored tokens", stored, 4 * 4 * WIDTH * DIM), same_bits("rotated", y, COUNT * DIM * (wide ? 4 : 2));
    enum { TOKENS = 6, KERNEL = 4, ALL = 2 * 2 * DIM + 4 * WIDTH };
    float *state = numbers(4 * DIM * WIDTH, 1, 1, 14), *out = room(4 * TOKENS * 4 * WIDTH);
    struct delta d = {numbers((KERNEL - 1 + TOKENS) * ALL, wide, 1, 15), numbers(TOKENS * 8, 1, 1, 16),
                      numbers(KERNEL * ALL, 1, 1, 17), numbers(4, 1, 1, 18), numbers(4, 1, 1, 19), state, out, TOKENS, ALL,
                      2, 4, DIM, WIDTH, KERNEL, wide};
    wrong += level->run[DELTA](&d);
    close_to("linear attention", out, TOKENS * 4 * WIDTH, 1e-5), close_to("its state", state, 4 * DIM * WIDTH, 1e-5);
}

static void round_cases(void) {
    static const float scales[] = {1, 1e-6f, 1e4f};
    static const int all_bits[] = {4, 5, 6, 8};
    for (int i = 0; i < 4 * 3 * 2; i++) {
        const int bits = all_bits[i % 4], groups = bits == 6 ? 5 : 37, count = groups * (bits == 6 ? 256 : GROUP_INPUTS);
        uint8_t *codes = room(count), *scale = memset(room(1024), 0, 1024), *minima = memset(room(1024), 0, 1024);
        struct rounding r = {numbers(count, i / 12, scales[i / 4 % 3], i), codes, scale, (uint16_t *)minima, groups, bits, i / 12,
                             1 + i % 3 * 4};
        int failed = level->run[ROUND](&r);
        same_bits("rounded", &failed, sizeof failed), same_bits("rounded", codes, count);
        same_bits("scales", scale, 1024), same_bits("minima", minima, 1024);
    }
}

int main(int count, char **arguments) {
    level = count == 3 ? triforce_level(arguments[2]) : NULL;
    if (!level)
        return 77;
    writes = !strcmp(arguments[1], "write");
    sum_error = strstr("portable neon avx2", level->name) ? 3e-6 : 4e-3;
    for (size_t i = 0; i < sizeof attentions / sizeof *attentions; i++)
        attend_case(attentions + i);
    linear_cases();
    row_cases(0), row_cases(1);
    round_cases();
    if (!writes)
        fprintf(stderr, "%s: %d wrong\n", level->name, wrong);
    return wrong != 0;
}
