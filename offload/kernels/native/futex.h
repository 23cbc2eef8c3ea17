/* Sleeping until a word in memory changes: a futex on Linux, one mutex and condition variable elsewhere. */
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>

/* Sleep while `word` is `value`, for at most `limit` ns if that is not 0. May return early. */
static void wait_while(atomic_uint *word, unsigned value, int64_t limit) {
    struct timespec time = {limit / 1000000000, limit % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, limit ? &time : NULL, NULL, 0);
}

/* Wake all threads that sleep on `word`; it was changed before. */
static void wake_all(atomic_uint *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0); }

static void reset_waiting(void) {}
#else
static pthread_mutex_t sleeping = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static void wait_while(atomic_uint *word, unsigned value, int64_t limit) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    int64_t end = now.tv_nsec + limit;
    struct timespec time = {now.tv_sec + end / 1000000000, end % 1000000000};
    pthread_mutex_lock(&sleeping);
    if (atomic_load(word) == value && limit)
        pthread_cond_timedwait(&changed, &sleeping, &time);
    else if (atomic_load(word) == value)
        pthread_cond_wait(&changed, &sleeping);
    pthread_mutex_unlock(&sleeping);
}

static void wake_all(atomic_uint *word) {
    (void)word;
    pthread_mutex_lock(&sleeping); /* a thread that has read the old value is asleep by now */
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&sleeping);
}

/* In the child of a fork, where other threads may have left the mutex locked. */
static void reset_waiting(void) {
    pthread_mutex_init(&sleeping, NULL);
    pthread_cond_init(&changed, NULL);
}
#endif
