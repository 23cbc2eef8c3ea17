/*
 * Calls the kernel from several threads at once, for ThreadSanitizer: scripts/check_sanitizers.sh builds and runs this.
 *
 * Python and torch are not built for it, so the kernel is included here, with a stand-in for torch's OpenMP runtime. More
 * callers than the pool has jobs run attention, linears, norms and appends, few rows and many; they pause, so that
 * workers fall asleep and wake up, and compare each result with that of one thread.
 */
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#undef __x86_64__ /* the portable level alone: threads are the same at all, and this compiles in seconds */
#include "../../../offload/kernels/native/kernel.c"

enum { CALLERS = MAX_JOBS + 2, THREADS = 11, ROUNDS = 10, DIM = 16, HEADS = 6, KV_HEADS = 2, PLAIN_KEYS = 620, FEW = 1, MANY = 70,
       INPUTS = 96, OUTPUTS = 80 };

static _Thread_local int threads = 1;

int omp_get_max_threads(void) { return threads; }
void omp_set_num_threads(int count) { threads = count; }

static const struct level *level;
static float kv[KV_HEADS * (PLAIN_KEYS + BLOCK) * 2 * DIM], queries[MANY * HEADS * DIM];
static float weight[(OUTPUTS + BLOCK) * INPUTS], rows[MANY * INPUTS], scale[INPUTS];

struct results {
    float attention[2][MANY * HEADS * DIM], product[2][MANY * OUTPUTS], norm[MANY * INPUTS], appended[2 * DIM * 80];
};
static struct results expected;

static void fill(float *x, size_t count, uint32_t seed) {
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525 + 1013904223;
        x[i] = (float)(int32_t)seed * 0x1p-31f;
    }
}

/* Run a call of each kind with `few` and `many` rows. */
static int run(struct results *r) {
    static const int counts[2] = {FEW, MANY};
    int failed = 0;
    for (int i = 0; i < 2; i++) {
        struct attention a = {.q = queries, .kv = (const char *)kv, .out = r->attention[i], .seen = 540, .causal = 1,
                              .tokens = counts[i], .kv_heads = KV_HEADS, .group = HEADS / KV_HEADS, .head_dim = DIM,
                              .wide = 1, .scale = 0.125f};
        a.head_stride = (int64_t)((PLAIN_KEYS + BLOCK - 1) / BLOCK) * BLOCK * 2 * DIM * 4;
        failed |= level->run[ATTEND](&a);
        struct linear l = {.x = rows, .weight = (const char *)weight, .y = r->product[i], .rows = counts[i],
                           .inputs = INPUTS, .outputs = OUTPUTS, .stride = OUTPUTS, .wide = 1};
        failed |= level->run[LINEAR](&l);
    }
    struct norm n = {.x = rows, .weight = scale, .y = r->norm, .rows = MANY, .width = INPUTS, .heads = 1, .stride = INPUTS,
                     .epsilon = 1e-5f, .wide = 1};
    failed |= level->run[NORM](&n);
    float rotated[MANY * DIM];
    struct append p = {.q = queries, .k = queries, .v = queries, .cos = queries, .sin = queries, .rotated = rotated,
                       .kv = (char *)r->appended, .q_stride = DIM, .k_stride = DIM, .v_stride = DIM, .tokens = MANY,
                       .heads = 1, .kv_heads = 1, .head_dim = DIM, .wide = 1};
    return failed | level->run[APPEND](&p);
}

static void *call(void *argument) {
    int number = (int)(intptr_t)argument, wrong = 0;
    struct results *found = calloc(1, sizeof *found);
    for (int round = 0; round < ROUNDS && found; round++) {
        threads = 1 + (number + round) % THREADS;
        if (round % 5 == number % 5)
            usleep(3000); /* longer than a worker spins */
        triforce_limit_torch(round % 2);
        wrong += run(found) || memcmp(found, &expected, sizeof expected);
        if (round % 2)
            triforce_limit_torch(0);
        memset(found->attention, 0, sizeof found->attention);
    }
    wrong += !found;
    free(found);
    return (void *)(intptr_t)wrong;
}

int main(void) {
    level = triforce_level("portable");
    fill(kv, sizeof kv / 4, 1), fill(queries, sizeof queries / 4, 2), fill(weight, sizeof weight / 4, 3);
    fill(rows, sizeof rows / 4, 4), fill(scale, sizeof scale / 4, 5);
    int wrong = run(&expected); /* by one thread: omp_get_max_threads() is 1 */
    pthread_t callers[CALLERS];
    for (int i = 0; i < CALLERS; i++)
        if (pthread_create(callers + i, NULL, call, (void *)(intptr_t)i))
            return 2;
    for (int i = 0; i < CALLERS; i++) {
        void *found;
        pthread_join(callers[i], &found);
        wrong += (int)(intptr_t)found;
    }
    printf("%d wrong results, with %d workers\n", wrong, atomic_load(&pool.started));
    return wrong != 0;
}
