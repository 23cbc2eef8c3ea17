/*
 * Attention, linears and norms for a host CPU, near its memory bandwidth.
 *
 * Plain C with GCC's vector extensions and a thread pool of its own (pool.h). The same source is compiled once a level
 * (portable, NEON, AVX2 with FMA, AVX-512 with bf16 dot products). The caller takes a level for which `triforce_level` is
 * not NULL. Functions return 0, 1 if an allocation failed, or 2 if an argument is invalid.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "types.h"

#define INLINE static inline __attribute__((always_inline)) TARGET
#define NOINLINE __attribute__((noinline)) TARGET /* one copy: its sums are contracted alike for all callers */
#define UNROLL _Pragma("GCC unroll 16")
#define JOIN(a, b) a##_##b
#define EXPAND(a, b) JOIN(a, b)
#define NAME(name) EXPAND(name, LEVEL)
/* Between these, no product is fused with a sum: the bits are the same at all levels, and on all processors. */
#ifdef __clang__
#define UNFUSED _Pragma("clang fp contract(off)")
#define END_UNFUSED _Pragma("clang fp contract(on)")
#else
#define UNFUSED _Pragma("GCC push_options") _Pragma("GCC optimize(\"fp-contract=off\")")
#define END_UNFUSED _Pragma("GCC pop_options")
#endif
#define STRING(text) #text
#define EXPAND_STRING(text) STRING(text)

/*
 * By how much a score may exceed the maximum that numerators of a softmax refer to, in powers of two, before sums are
 * rescaled: that is seldom then, and numerators in bf16 are as exact.
 */
#define SLACK 8.0f

enum { KEYS = 1, VALUES = 2 };

/* The functions of a level, by the operation; each takes the operation's struct. */
struct level {
    const char *name;
    int (*run[OPERATIONS])(const void *call);
};

enum { LINE = 128 }; /* bytes that move between cores together: two lines on x86, one on Apple's */

/* Scratch memory that a thread reuses from call to call. It only grows. */
struct memory {
    void *start;
    size_t size;
};
static _Thread_local struct memory own_memory; /* of one thread */
static _Thread_local struct memory shared_memory, tree_memory, row_memory; /* of all threads of its call */

static void *scratch(struct memory *m, size_t size) {
    if (size > m->size) {
        free(m->start);
        size_t rounded = (size + LINE - 1) / LINE * LINE;
        m->start = aligned_alloc(LINE, rounded);
        m->size = m->start ? rounded : 0;
    }
    return m->start;
}

static inline float widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

static inline uint16_t narrow(float x) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#include "pool.h"

#include "store.h"

#include "packed_kv.h"

#include "kv_groups.h"

#include "pack.h"

#define LEVEL portable
#define LANES 8
#define DOTS 0
#define HAS_MAX 0
#define TARGET
#include "level.h"

#ifdef __aarch64__
#include <arm_neon.h>
#ifndef __clang__ /* GCC would move loads up until the sums of a tile leave their registers */
#pragma GCC optimize("no-schedule-insns")
#endif
#define LEVEL neon
#define LANES 4
#define DOTS 0
#define HAS_MAX 1
#define TARGET
#include "level.h"

/* Older compilers do not know bf16 instructions. */
#if defined(__clang__) || __GNUC__ >= 10
#ifdef __linux__
#include <sys/auxv.h>
#else
#include <sys/sysctl.h>
#endif
#define HAS_BF16 1
#define LEVEL bf16
#define LANES 4
#define DOTS 1
#define HAS_MAX 1
#define TARGET __attribute__((target("arch=armv8.2-a+bf16+dotprod")))
#include "level.h"

static int has_bf16(void) { /* and products of bytes */
#ifdef __linux__
    return getauxval(AT_HWCAP2) & 1 << 14 && getauxval(AT_HWCAP) & 1 << 20; /* HWCAP2_BF16, HWCAP_ASIMDDP */
#elif defined(__APPLE__)
    int bf16 = 0, products = 0;
    size_t size = sizeof bf16;
    return !sysctlbyname("hw.optional.arm.FEAT_BF16", &bf16, &size, NULL, 0) && bf16 &&
           !sysctlbyname("hw.optional.arm.FEAT_DotProd", &products, &size, NULL, 0) && products;
#else
    return 0;
#endif
}
#endif
#endif

#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>

#ifndef TRIFORCE_EMULATE /* an emulating build is for the levels that a processor may lack */
#define LEVEL avx2
#define LANES 8
#define DOTS 0
#define HAS_MAX 1
#define TARGET __attribute__((target("avx2,fma,f16c")))
#include "level.h"
#endif

/* Older compilers do not know bf16 instructions. */
#if defined(TRIFORCE_EMULATE) || defined(__clang__) || __GNUC__ >= 11
#define HAS_AVX512 1
#ifdef TRIFORCE_EMULATE /* for tests on any processor: special instructions in plain C */
#define HAS_BUILTINS 0
#define AVX512 "avx2,fma"
#else
#define HAS_BUILTINS 1
#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c"
#endif

#define LEVEL avx512
#define LANES 16
#define DOTS 1
#define HAS_MAX HAS_BUILTINS
#define TARGET __attribute__((target(AVX512)))
#include "level.h"
#endif
#endif

/* Return a number for the structs and layouts of this build; Python refuses a library whose number differs. */
int64_t triforce_layout(void) {
    const int64_t sizes[] = {
        sizeof(struct attention), sizeof(struct merge), sizeof(struct observation), sizeof(struct key_scores),
        sizeof(struct linear), sizeof(struct norm), sizeof(struct rounding), sizeof(struct delta),
        sizeof(struct quantize), sizeof(struct packing), sizeof(struct append), sizeof(struct pack),
        sizeof(struct unpack), sizeof(struct pass), sizeof(struct format), sizeof(struct linears),
        sizeof(struct layer), sizeof(struct sequence),
    };
    uint64_t number = LAYOUT; /* it wraps */
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        number = number * 257 + sizes[i];
    return (int64_t)number;
}

/* Return the level of that name, or NULL if this processor or this build does not have it. */
const struct level *triforce_level(const char *name) {
#ifdef __x86_64__
    __builtin_cpu_init();
    unsigned int a, b, c = 0, d;
    int has_halves = __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C; /* older compilers do not know its name */
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_halves;
#ifdef TRIFORCE_EMULATE
    int avx512 = avx2;
#elif HAS_AVX512
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                 __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
#endif
#if HAS_AVX512
    if (avx512 && !strcmp(name, level_avx512.name))
        return &level_avx512;
#endif
#ifndef TRIFORCE_EMULATE
    if (avx2 && !strcmp(name, level_avx2.name))
        return &level_avx2;
#endif
#endif
#ifdef HAS_BF16
    if (!strcmp(name, level_bf16.name))
        return has_bf16() ? &level_bf16 : NULL;
#endif
#ifdef __aarch64__
    if (!strcmp(name, level_neon.name))
        return &level_neon;
#endif
    return strcmp(name, level_portable.name) ? NULL : &level_portable;
}

/* Write linears of rows of x to y, or add them; there are `stride` elements between rows of y. */
int triforce_linears(const struct level *level, const struct linears *l, const void *x, void *y, int64_t rows,
                     int64_t stride, int32_t add, int32_t wide_out) {
    int64_t at = 0;
    for (int i = 0; i < l->count; i++) {
        struct linear part = l->parts[i];
        part.x = x, part.rows = rows, part.stride = stride, part.wide_out = wide_out;
        part.y = (char *)y + at * (part.wide || wide_out ? 4 : 2);
        part.onto = add ? part.y : NULL;
        if (level->run[LINEAR](&part))
            return 1;
        at += part.outputs;
    }
    return 0;
}

#include "pass.h"

/* Run an operation at a level. */
int triforce_run(const struct level *level, int operation, const void *call) {
    return operation == PASS ? run_pass(level, call) : level->run[operation](call);
}

/*
 * While `limited`, torch's own operations in this thread run on this thread alone, and only the kernel uses as many as
 * were set: torch's idle threads would spin beside the kernel's. Calls may be nested if each is undone in turn.
 */
void triforce_limit_torch(int limited) {
    if (!omp_get_max_threads || !omp_set_num_threads)
        return;
    limits += limited ? 1 : -1;
    if (limited && limits == 1) {
        own_threads = omp_get_max_threads();
        omp_set_num_threads(1);
    } else if (!limited && limits == 0) {
        omp_set_num_threads(own_threads);
        own_threads = 0;
    }
}
