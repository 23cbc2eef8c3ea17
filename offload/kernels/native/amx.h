/*
 * AMX: eight tile registers of up to 16 rows of 64 bytes, and products of tiles in bf16 with sums in fp32, or of signed
 * bytes, four to a lane in place of two, with sums in 32 bits.
 *
 * `c += a b` for tiles a [rows][pairs][2] bf16, b [pairs][16][2] bf16 and c [rows][16] fp32: b has the layout in which
 * keys, values and weights are stored. A row of c depends on the same row of a alone. The state is released after use:
 * the kernel would save 8 KB with every switch of threads.
 */
#ifdef TRIFORCE_EMULATE
static _Thread_local struct emulated_tile {
    int rows, bytes;
    char memory[16][64];
} emulated[8];

static void emulate_shape(int tile, int rows, int bytes) {
    emulated[tile] = (struct emulated_tile){.rows = rows, .bytes = bytes};
}

static void emulate_load(int tile, const void *memory, int64_t stride) {
    const char *from = memory;
    for (int r = 0; r < emulated[tile].rows; r++)
        memcpy(emulated[tile].memory[r], from + r * stride, emulated[tile].bytes);
}

static void emulate_store(int tile, void *memory, int64_t stride) {
    char *to = memory;
    for (int r = 0; r < emulated[tile].rows; r++)
        memcpy(to + r * stride, emulated[tile].memory[r], emulated[tile].bytes);
}

/* Element i of a row of bf16. */
static float emulate_at(int tile, int row, int i) { return widen(((uint16_t *)emulated[tile].memory[row])[i]); }

static void emulate_dot(int c, int a, int b) {
    for (int r = 0; r < emulated[c].rows; r++)
        for (int n = 0; n < emulated[c].bytes / 4; n++) {
            float even = 0, odd = 0;
            for (int k = 0; k < emulated[b].rows; k++) {
                even += emulate_at(a, r, 2 * k) * emulate_at(b, k, 2 * n);
                odd += emulate_at(a, r, 2 * k + 1) * emulate_at(b, k, 2 * n + 1);
            }
            ((float *)emulated[c].memory[r])[n] += even + odd;
        }
}

/* Of signed bytes, four to a sum. */
static void emulate_dot_bytes(int c, int a, int b) {
    for (int r = 0; r < emulated[c].rows; r++)
        for (int n = 0; n < emulated[c].bytes / 4; n++)
            for (int k = 0; k < 4 * emulated[b].rows; k++)
                ((int32_t *)emulated[c].memory[r])[n] +=
                    (int8_t)emulated[a].memory[r][k] * (int8_t)emulated[b].memory[k / 4][4 * n + k % 4];
}

#define TILE_LOAD(tile, from, stride) emulate_load(tile, from, stride)
#define TILE_STORE(tile, to, stride) emulate_store(tile, to, stride)
#define TILE_ZERO(tile) memset(emulated[tile].memory, 0, sizeof emulated[tile].memory)
#define TILE_DOT(c, a, b) emulate_dot(c, a, b)
#define TILE_DOT_BYTES(c, a, b) emulate_dot_bytes(c, a, b)
#define TILE_RELEASE() ((void)0)
#define TILE_FENCE() ((void)0)
#else
#define TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)
#define TILE_DOT_BYTES(c, a, b) _tile_dpbssd(c, a, b)
#define TILE_RELEASE() _tile_release()
/* After stores that tiles read: GCC 12 does not know that they do, nor that shapes have 64 bytes. */
#define TILE_FENCE() __asm__ volatile("" ::: "memory")
#endif

/* Operand of LDTILECFG. */
struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

/*
 * Set the shapes for products of `rows` rows (1 to 32, in one or two tiles) with `pairs` pairs: tiles 0 to 3 are sums,
 * those of the second sixteen rows last, 4 and 5 are rows, 6 and 7 are columns.
 */
__attribute__((target(AMX))) static void set_tile_shapes(int rows, int pairs) {
    struct tile_shapes shapes = {.palette = 1};
    int upper = rows < 16 ? rows : 16, lower = rows - upper;
    for (int tile = 0; tile < 8; tile++) {
        int second = lower && (tile == 2 || tile == 3 || tile == 5);
        shapes.rows[tile] = tile >= 6 ? pairs : second ? lower : upper;
        shapes.bytes[tile] = tile == 4 || tile == 5 ? 4 * pairs : 64;
    }
#ifdef TRIFORCE_EMULATE
    for (int tile = 0; tile < 8; tile++)
        emulate_shape(tile, shapes.rows[tile], shapes.bytes[tile]);
#else
    TILE_FENCE();
    _tile_loadconfig(&shapes);
#endif
}

/* Ask the system for the use of tile registers by this process. Returns 0 if the processor or the system has none. */
static int has_tiles(void) {
#if defined(TRIFORCE_EMULATE)
    return 1;
#elif defined(__linux__)
    enum { PRODUCTS = 1 << 22 | 1 << 25, TILES = 1 << 24, REQUEST_STATE = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (PRODUCTS | TILES)) != (PRODUCTS | TILES))
        return 0;
    return !syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA);
#else
    return 0;
#endif
}

enum {
    TILE_ROWS = 32,            /* rows that read a piece together, in two tiles */
    SCORE_STRIDE = PIECE + 16, /* floats between rows: a power of two would put them into the same cache sets */
    WEIGHT_STRIDE = PIECE + 32,
};

struct tile_work {
    float scores[TILE_ROWS * SCORE_STRIDE];
    uint16_t weights[TILE_ROWS * WEIGHT_STRIDE];
};

struct scales { /* of a piece's values */
    float scales[PIECE], middles[PIECE];
    float unit;
};

enum {
    GROUPS = 4, /* quantised groups whose scores are computed together, to hide latencies */
    BYTE_STRIDE = PIECE + 64,
    PRODUCT_STRIDE = MAX_HEAD_DIM + 16, /* at least GROUPS * SPAN */
};

struct byte_work { /* see quantized_kv_amx.h */
    int8_t digits[GROUPS * 2 * TILE_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64))); /* of a row: high, low */
    int8_t codes[PIECE * MAX_HEAD_DIM] __attribute__((aligned(64)));
    int32_t products[2 * TILE_ROWS * PRODUCT_STRIDE] __attribute__((aligned(64)));
    float queries[TILE_ROWS * MAX_HEAD_DIM];
    float largest[MAX_HEAD_DIM];
    uint16_t middles[PIECE / SPAN][MAX_HEAD_DIM] __attribute__((aligned(64)));
    int32_t columns[MAX_HEAD_DIM / 2][16] __attribute__((aligned(64)));
    float sums[PIECE / SPAN][TILE_ROWS];
    float units[TILE_ROWS];
};

enum {
    SPREAD_ROWS = 8,  /* rows that become two where a format has a scale for 16 inputs */
    TILE_GROUP = 256, /* rows that read a panel together */
    CHUNK = 8,        /* groups of quantised weights whose levels stay in the first-level cache */
};

struct tile_linear_work {
    uint16_t levels[CHUNK * GROUP_INPUTS * BLOCK];
    uint16_t spread[CHUNK][2 * SPREAD_ROWS][GROUP_INPUTS];
    float products[2 * CHUNK][TILE_ROWS][BLOCK]; /* of each scale's inputs */
    float scales[2 * CHUNK][BLOCK], minima[CHUNK][BLOCK];
    float c[TILE_GROUP * 2 * BLOCK];
    int rows, pairs; /* the shapes of the tiles */
};

static inline __attribute__((target(AMX), always_inline)) void use_shapes(struct tile_linear_work *w, int rows, int pairs) {
    if (w->rows == rows && w->pairs == pairs)
        return;
    set_tile_shapes(rows, pairs);
    w->rows = rows, w->pairs = pairs;
}
