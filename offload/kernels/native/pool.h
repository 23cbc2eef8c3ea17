/*
 * A thread pool for the kernel's loops: `pool_run` calls a task for parts of a range on several threads at once.
 *
 * OpenMP divides a loop evenly and lets idle threads spin. Beside another busy process that makes every loop wait for
 * the thread that is not running. Here the calling thread takes part, parts are taken from an atomic counter, idle
 * threads spin for a bounded time and then sleep, and a worker that the scheduler keeps waiting is parked: it leaves
 * short loops (decoding) to the others until its time is over, and doubles that time if it is kept waiting again.
 *
 * Threads form teams, each of which has a counter and a share of the range, and then helps the others: one counter for 64
 * threads would be a queue, as a cache line moves between two of them in 50 to 200 ns.
 *
 * Tasks must not depend on which thread runs them or on how the range is cut, so results do not depend on the pool.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "futex.h"

enum {
    MAX_WORKERS = 255,
    TEAM = 8,              /* threads */
    MAX_TEAMS = (MAX_WORKERS + 1) / TEAM,
    MAX_JOBS = 4,          /* of concurrent callers; further callers run their loops alone */
    PARTS = 4,             /* a thread takes its team's remaining range / (PARTS * threads) at once */
    IDLE_SPIN_NS = 300000, /* above the time between two kernel calls of a token */
    JOIN_SPIN_NS = 50000,  /* a caller waits longer only for a thread that is not running */
    LONG_RUN_NS = 300000,  /* only after runs of this length; others were not interrupted */
    WINDOW_NS = 50000000,  /* the time between two checks, at least */
    CONTENDED = 4,         /* a thread that waits for a processor in 1/CONTENDED of the time has a competitor */
    LONG_ROWS = 64,        /* a call of so many rows is prefill, not decoding or verification */
};
static const int64_t FIRST_PARK_NS = 400000000, LONGEST_PARK_NS = 3200000000;
static const int64_t TRIAL_NS = 1000000000; /* contention within this time of the last park doubles the next one */

typedef int pool_task(const void *context, int64_t first, int64_t last); /* returns 1 on failure, else 0 */

/* The part of a job's range that a team's threads take first. What threads write lies apart from what they read. */
struct team {
    _Alignas(LINE) _Atomic int64_t next;
    atomic_uint visitors; /* its workers that may be inside the job; a futex word */
    int threads;
    int64_t end;
};

struct job {
    _Alignas(LINE) atomic_int open;
    atomic_int threads;
    int team_count, is_long;
    pool_task *task;
    const void *context;
    _Alignas(LINE) atomic_int claimed;
    atomic_int failed, joining; /* joining: the caller sleeps on the visitors of a team */
    struct team teams[MAX_TEAMS];
};
_Static_assert(sizeof(struct team) == LINE && offsetof(struct job, claimed) == LINE &&
                   offsetof(struct job, teams) == 2 * LINE, "threads write to cache lines of their own");

/* Run-queue wait of one thread, as last read. */
struct wait_time {
    int64_t waited, at;
};

struct worker {
    _Atomic int64_t parked_until, park_ns;
};

static struct {
    struct job jobs[MAX_JOBS];
    _Alignas(LINE) atomic_uint published; /* futex words: count all jobs, and those that wake parked workers */
    _Alignas(LINE) atomic_uint published_long;
    _Alignas(LINE) atomic_int idle;
    atomic_int parked, started; /* idle and parked: workers that sleep on the words */
    struct worker workers[MAX_WORKERS];
    pthread_mutex_t starting;
} pool = {.starting = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local struct wait_time caller_wait;

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

/* Spin until `word` differs from `value`. Returns 0 if it still does not after `limit` ns. */
static int spin_while(atomic_uint *word, unsigned value, int64_t limit) {
    int64_t end = 0;
    for (int i = 0; atomic_load_explicit(word, memory_order_acquire) == value; i++) {
        spin_pause();
        if (i % 64 == 63) {
            int64_t now = now_ns();
            end = end ? end : now + limit;
            if (now > end)
                return 0;
        }
    }
    return 1;
}

/* Nanoseconds for which this thread was ready to run but another ran in its place; 0 where the system does not say. */
static int64_t run_queue_wait(void) {
    long long ran, waited = 0;
    FILE *file = fopen("/proc/thread-self/schedstat", "re");
    if (!file)
        return 0;
    if (fscanf(file, "%lld %lld", &ran, &waited) != 2)
        waited = 0;
    fclose(file);
    return waited;
}

/* Whether other threads competed for this thread's processor since the last check. `begun` is the start of its run. */
static int is_contended(struct wait_time *w, int64_t begun) {
    int64_t now = now_ns();
    if (now - begun < LONG_RUN_NS || now - w->at < WINDOW_NS)
        return 0;
    struct wait_time last = *w;
    *w = (struct wait_time){run_queue_wait(), now};
    return last.at && w->waited - last.waited > (now - last.at) / CONTENDED;
}

/* Park a worker; for longer if contention follows soon after the last time, which is extended if it is not over. */
static void park(struct worker *w) {
    int64_t now = now_ns(), since = now - w->parked_until;
    if (!w->park_ns || since > TRIAL_NS)
        w->park_ns = FIRST_PARK_NS;
    else if (since > 0)
        w->park_ns = 2 * w->park_ns < LONGEST_PARK_NS ? 2 * w->park_ns : LONGEST_PARK_NS;
    w->parked_until = now + w->park_ns;
}

/* Take parts of a team's range until none is left. Returns whether there was one. */
static int take_parts(struct job *j, struct team *t) {
    int64_t first = atomic_load(&t->next);
    for (int found = 0;;) {
        int64_t left = t->end - first, size = left / (PARTS * t->threads);
        if (left <= 0)
            return found;
        size = size ? size : 1;
        if (!atomic_compare_exchange_weak(&t->next, &first, first + size))
            continue;
        if (j->task(j->context, first, first + size))
            atomic_store(&j->failed, 1);
        found = 1;
        first = atomic_load(&t->next);
    }
}

/* Take parts of the job's range, those of a team first, until none is left. Returns whether there was one. */
static int take_all(struct job *j, int team) {
    int found = 0;
    for (int i = 0; i < j->team_count; i++)
        found |= take_parts(j, j->teams + (team + i) % j->team_count);
    return found;
}

/* Take part in all open jobs. Returns whether there was one. */
static int visit_jobs(int index, int parked) {
    int found = 0;
    for (struct job *j = pool.jobs; j < pool.jobs + MAX_JOBS; j++) {
        if (!atomic_load(&j->open) || index >= atomic_load(&j->threads) - 1)
            continue;
        atomic_uint *visitors = &j->teams[index / TEAM].visitors;
        atomic_fetch_add(visitors, 1); /* before `open` is read; a caller closes the job, then waits */
        if (atomic_load(&j->open) && index < atomic_load(&j->threads) - 1 && (j->is_long || !parked))
            found |= take_all(j, index / TEAM);
        if (atomic_fetch_sub(visitors, 1) == 1 && atomic_load(&j->joining))
            wake_all(visitors);
    }
    return found;
}

static void *work(void *argument) {
    int index = (int)(intptr_t)argument;
    struct worker *w = pool.workers + index;
    struct wait_time wait = {0};
    for (;;) {
        int64_t begun = now_ns(), rest = w->parked_until - begun;
        int parked = rest > 0;
        atomic_uint *word = parked ? &pool.published_long : &pool.published;
        atomic_int *sleepers = parked ? &pool.parked : &pool.idle;
        unsigned seen = atomic_load(word);
        if (visit_jobs(index, parked) && is_contended(&wait, begun)) {
            park(w);
            continue;
        }
        if (!parked && spin_while(word, seen, IDLE_SPIN_NS))
            continue;
        atomic_fetch_add(sleepers, 1);
        wait_while(word, seen, parked ? rest : 0);
        atomic_fetch_sub(sleepers, 1);
    }
    return NULL;
}

/* A child process has only the thread that called fork; it starts workers of its own when it needs them. */
static void reset_after_fork(void) {
    memset(&pool, 0, sizeof pool);
    pthread_mutex_init(&pool.starting, NULL);
    reset_waiting();
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
    pthread_mutex_lock(&pool.starting);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    while (pool.started < count && !pthread_create(&thread, NULL, work, (void *)(intptr_t)pool.started)) {
        pthread_detach(thread);
        atomic_fetch_add(&pool.started, 1);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_mutex_unlock(&pool.starting);
}

static struct job *claim_job(void) {
    for (struct job *j = pool.jobs; j < pool.jobs + MAX_JOBS; j++) {
        int free = 0;
        if (!atomic_load(&j->claimed) && atomic_compare_exchange_strong(&j->claimed, &free, 1))
            return j;
    }
    return NULL;
}

/* Divide `count` parts among teams, and let workers into a job whose other fields are set. */
static void open_job(struct job *j, int64_t count, int threads) {
    j->team_count = (threads + TEAM - 1) / TEAM;
    for (int i = 0; i < j->team_count; i++) {
        struct team *t = j->teams + i;
        int before = TEAM * i, after = before + TEAM < threads ? before + TEAM : threads;
        t->threads = after - before, t->end = count * after / threads;
        atomic_store(&t->next, count * before / threads);
    }
    atomic_store(&j->failed, 0); /* first: who came late to the last job may enter as soon as he reads `threads` */
    atomic_store(&j->threads, threads);
    atomic_store(&j->open, 1);
    atomic_fetch_add(&pool.published, 1);
    if (atomic_load(&pool.idle)) /* read after `published` is changed: a worker counts itself, then compares */
        wake_all(&pool.published);
    if (!j->is_long)
        return;
    atomic_fetch_add(&pool.published_long, 1);
    if (atomic_load(&pool.parked))
        wake_all(&pool.published_long);
}

/* Wait until no worker is inside, and free the job. Returns whether a task failed. */
static int close_job(struct job *j) {
    atomic_store(&j->open, 0);
    int workers = atomic_load(&pool.started), asked = atomic_load(&j->threads) - 1;
    for (int team = (workers > asked ? workers : asked) / TEAM; team >= 0; team--) { /* others come late, and leave */
        atomic_uint *visitors = &j->teams[team].visitors;
        for (unsigned inside; (inside = atomic_load(visitors));) {
            if (spin_while(visitors, inside, JOIN_SPIN_NS))
                continue;
            atomic_store(&j->joining, 1);
            wait_while(visitors, inside, 0);
            atomic_store(&j->joining, 0);
        }
    }
    int failed = atomic_load(&j->failed);
    atomic_store(&j->claimed, 0);
    return failed;
}

/* The caller competes with another process: leave it the processor of the last worker that is not parked. */
static void park_last(int workers) {
    int64_t now = now_ns();
    while (workers-- > 0)
        if (pool.workers[workers].parked_until < now) {
            park(pool.workers + workers);
            return;
        }
}

/* The threads that a loop of this caller may use: the OpenMP setting of its thread, which is torch's. */
static int pool_threads(void) {
    return own_threads ? own_threads : omp_get_max_threads ? omp_get_max_threads() : 1;
}

/*
 * Call `task` for parts of 0 .. count - 1, on this thread and on workers; return whether one failed, once all are done.
 * A job is long if parts of it take longer than the scheduler's time slices, so that even a parked worker is of use.
 */
static int pool_run(pool_task *task, const void *context, int64_t count, int is_long) {
    int most = count < MAX_WORKERS + 1 ? (int)count : MAX_WORKERS + 1, threads = pool_threads();
    threads = threads < most ? threads : most;
    if (threads < 2)
        return threads && task(context, 0, count);
    struct job *j = claim_job();
    if (!j)
        return task(context, 0, count);
    start_workers(threads - 1);
    int64_t begun = now_ns();
    j->task = task, j->context = context, j->is_long = is_long;
    open_job(j, count, threads);
    take_all(j, j->team_count - 1);
    int failed = close_job(j);
    if (is_contended(&caller_wait, begun))
        park_last(threads - 1);
    return failed;
}

/* Run a loop over rows that are cheap: few of them on this thread alone. */
static int run_rows(pool_task *task, const void *context, int64_t rows) {
    return rows > 16 ? pool_run(task, context, rows, rows >= LONG_ROWS) : task(context, 0, rows);
}
