/*
 * A thread pool for the kernel's loops: `pool_run` calls a task for parts of a range on several threads at once.
 *
 * OpenMP divides a loop evenly and lets idle threads spin, so that beside another busy process every loop waits for the
 * thread that is not running. Here the calling thread takes part, parts are taken from an atomic counter, and idle threads
 * spin for a bounded time and then sleep.
 *
 * Tasks must not depend on which thread runs them or on how the range is cut, so results do not depend on the pool.
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

enum {
    MAX_WORKERS = 255,
    MAX_JOBS = 4,          /* of concurrent callers; further callers run their loops alone */
    PARTS = 4,             /* a thread takes the remaining range / (PARTS * threads) at once */
    IDLE_SPIN_NS = 300000, /* above the time between two kernel calls of a token */
    JOIN_SPIN_NS = 50000,  /* a caller waits longer only for a thread that is not running */
};

typedef int pool_task(const void *context, int64_t first, int64_t last); /* returns 1 on failure, else 0 */

struct job { /* what all threads write lies apart from what they read */
    _Alignas(LINE) atomic_int open; /* how many workers may take part */
    int threads;
    int64_t count;
    pool_task *task;
    const void *context;
    _Alignas(LINE) _Atomic int64_t next; /* the first index that nobody has taken */
    _Alignas(LINE) atomic_uint inside;   /* workers that may be in the job */
    atomic_int failed, claimed;
};

static struct {
    struct job jobs[MAX_JOBS];
    _Alignas(LINE) atomic_uint published; /* jobs so far */
    _Alignas(LINE) atomic_int idle; /* workers that sleep until `published` changes */
    atomic_int joining;             /* callers that sleep until the `inside` of their job changes */
    atomic_int started;             /* workers */
    pthread_mutex_t mutex;
    pthread_cond_t changed;
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

/* Of the OpenMP runtime that torch has loaded. */
extern int omp_get_max_threads(void) __attribute__((weak));
extern void omp_set_num_threads(int) __attribute__((weak));
static _Thread_local int limits, own_threads; /* set while torch is limited to one thread; see triforce_limit_torch */

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static inline void spin_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Spin until `word` differs from `value`, for `limit` ns at most; then sleep until it does, counted in `sleepers`. */
static void wait_while(atomic_uint *word, unsigned value, int64_t limit, atomic_int *sleepers) {
    int64_t end = 0;
    for (int i = 0; atomic_load_explicit(word, memory_order_acquire) == value; i++) {
        spin_pause();
        if (i % 64 < 63)
            continue;
        int64_t now = now_ns();
        end = end ? end : now + limit;
        if (now > end)
            break;
    }
    if (atomic_load(word) != value)
        return;
    pthread_mutex_lock(&pool.mutex);
    atomic_fetch_add(sleepers, 1); /* before `word` is read: it is changed, then `sleepers` is read */
    while (atomic_load(word) == value)
        pthread_cond_wait(&pool.changed, &pool.mutex);
    atomic_fetch_sub(sleepers, 1);
    pthread_mutex_unlock(&pool.mutex);
}

/* Wake the threads that sleep until a word changes, which has changed. */
static void wake_all(atomic_int *sleepers) {
    if (!atomic_load(sleepers))
        return;
    pthread_mutex_lock(&pool.mutex); /* a thread that has read the old value is asleep by now */
    pthread_cond_broadcast(&pool.changed);
    pthread_mutex_unlock(&pool.mutex);
}

/* Take parts of a job's range until none is left. */
static void take_parts(struct job *j) {
    int64_t first = atomic_load(&j->next);
    for (;;) {
        int64_t left = j->count - first, size = left / (PARTS * j->threads);
        if (left <= 0)
            return;
        size = size ? size : 1;
        if (!atomic_compare_exchange_weak(&j->next, &first, first + size))
            continue;
        if (j->task(j->context, first, first + size))
            atomic_store(&j->failed, 1);
        first = atomic_load(&j->next);
    }
}

/* Take part in all open jobs, in turn. */
static void *work(void *argument) {
    const int index = (int)(intptr_t)argument;
    for (;;) {
        unsigned seen = atomic_load(&pool.published);
        for (struct job *j = pool.jobs; j < pool.jobs + MAX_JOBS; j++) {
            if (index >= atomic_load(&j->open))
                continue;
            atomic_fetch_add(&j->inside, 1); /* before `open` is read again: a caller closes the job, then waits */
            if (index < atomic_load(&j->open))
                take_parts(j);
            if (atomic_fetch_sub(&j->inside, 1) == 1)
                wake_all(&pool.joining);
        }
        wait_while(&pool.published, seen, IDLE_SPIN_NS, &pool.idle);
    }
    return NULL;
}

/* A child process has only the thread that called fork; it starts workers of its own when it needs them. */
static void reset_after_fork(void) {
    memset(&pool, 0, sizeof pool);
    pthread_mutex_init(&pool.mutex, NULL);
    pthread_cond_init(&pool.changed, NULL);
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, reset_after_fork); }

/* Start workers until there are `count`, or as many as the system allows. They leave all signals to other threads. */
static void start_workers(int count) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    if (atomic_load(&pool.started) >= count)
        return;
    pthread_once(&once, watch_forks);
    sigset_t all, before;
    sigfillset(&all);
    pthread_mutex_lock(&pool.mutex);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    while (pool.started < count && !pthread_create(&thread, NULL, work, (void *)(intptr_t)pool.started)) {
        pthread_detach(thread);
        atomic_fetch_add(&pool.started, 1);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_mutex_unlock(&pool.mutex);
}

static struct job *claim_job(void) {
    for (struct job *j = pool.jobs; j < pool.jobs + MAX_JOBS; j++)
        if (!atomic_load(&j->claimed) && !atomic_exchange(&j->claimed, 1))
            return j;
    return NULL;
}

/* The threads that a loop of this caller may use: the OpenMP setting of its thread, which is torch's. */
static int pool_threads(void) {
    return own_threads ? own_threads : omp_get_max_threads ? omp_get_max_threads() : 1;
}

/* Call `task` for parts of 0 .. count - 1, on this thread and on workers; return whether one failed, once all are done. */
static int pool_run(pool_task *task, const void *context, int64_t count) {
    int most = count < MAX_WORKERS + 1 ? (int)count : MAX_WORKERS + 1, threads = pool_threads();
    threads = threads < most ? threads : most;
    if (threads < 2)
        return threads && task(context, 0, count);
    struct job *j = claim_job();
    if (!j)
        return task(context, 0, count);
    start_workers(threads - 1);
    j->task = task, j->context = context, j->count = count, j->threads = threads;
    atomic_store(&j->failed, 0);
    atomic_store(&j->next, 0);
    atomic_store(&j->open, threads - 1);
    atomic_fetch_add(&pool.published, 1);
    wake_all(&pool.idle);
    take_parts(j);
    atomic_store(&j->open, 0);
    for (unsigned inside; (inside = atomic_load(&j->inside));)
        wait_while(&j->inside, inside, JOIN_SPIN_NS, &pool.joining);
    int failed = atomic_load(&j->failed);
    atomic_store(&j->claimed, 0);
    return failed;
}

/* Run a loop over rows that are cheap: few of them on this thread alone. */
static int run_rows(pool_task *task, const void *context, int64_t rows) {
    return rows > 16 ? pool_run(task, context, rows) : task(context, 0, rows);
}
