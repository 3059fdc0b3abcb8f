/* A pool of threads that share numbered tasks.
 *
 * Threads take tasks from a counter, since on a busy machine they are not equally fast. An idle worker spins for a
 * while, since the phases of one layer follow within microseconds, and then sleeps on a futex, so that an idle server
 * uses no core.
 *
 *     caller                                   worker
 *     next = 0, gate = OPEN                    sleeps until seq changes
 *     seq += 1, wake                           gate += 1, if it is OPEN; else sleeps again
 *     takes tasks until next >= tasks          takes tasks until next >= tasks
 *     gate -= OPEN                             gate -= 1; the last one wakes the caller
 *     waits until gate == 0
 *
 * The caller waits only for workers inside the gate: one that wakes up too late, because other processes have its core,
 * finds it closed and delays nobody. No worker can use the counters of a later round with the task of an earlier one.
 *
 * Whether the workers are worth their wake-up depends on the machine and on what else it does: 1 us while they spin,
 * 200 us on a halted virtual core. So the pool learns it, from the times of calls with and without them.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LINE_BYTES 64 /* Of a processor's cache. */
#define OPEN 0x10000u
#define SPINS 2000 /* 50 to 130 us: depends on the CPU's pause instruction. */
/* Work of more bytes is always shared, and of fewer never; sizes between them are told apart by their power of 2. */
#define MOST_ALONE_LOG2 30
#define LEAST_SHARED_LOG2 18
#define SIZES (MOST_ALONE_LOG2 - LEAST_SHARED_LOG2)
/* A slower call changes the expected time by this part: one that was interrupted says little. */
#define SLOWER_PART 8
/* The slower way is tried again after so many calls, times the square of how much slower it is: so that trying costs
 * less than 1 %. */
#define RETRY_CALLS 32

typedef struct {
    Pool *pool;
    int thread;
    pthread_t handle;
} Worker;

/* Expected times of work of one size, in ns; 0: not known. */
typedef struct {
    double alone, shared;
    unsigned calls; /* Since the slower way was last tried. */
} Expected;

struct Pool {
    _Alignas(LINE_BYTES) atomic_uint seq; /* Rounds begun. */
    _Alignas(LINE_BYTES) atomic_uint gate; /* Workers in this round, and OPEN while others may join. */
    _Alignas(LINE_BYTES) atomic_int next; /* Next task. */
    _Alignas(LINE_BYTES) atomic_bool stopping;
    atomic_flag busy; /* With a caller's tasks. */
    Task *task;
    void *context;
    int tasks, threads;
    bool learns;
    Expected expected[SIZES];
    Worker *workers; /* threads - 1 */
};

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void sleep_while(atomic_uint *word, unsigned value) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != value) return;
        relax();
    }
    while (atomic_load_explicit(word, memory_order_acquire) == value)
        syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake_all(atomic_uint *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0);
}

static void take_tasks(Pool *pool, int thread) {
    for (;;) {
        int task = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed);
        if (task >= pool->tasks) return;
        pool->task(pool->context, task, thread);
    }
}

/* Whether the worker now takes part in the present round. */
static bool enter(Pool *pool) {
    unsigned gate = atomic_load_explicit(&pool->gate, memory_order_relaxed);
    while (gate & OPEN)
        if (atomic_compare_exchange_weak_explicit(&pool->gate, &gate, gate + 1, memory_order_acquire,
                                                  memory_order_relaxed))
            return true;
    return false;
}

static void *work(void *argument) {
    Worker *worker = argument;
    Pool *pool = worker->pool;
    for (unsigned seen = 0;;) {
        sleep_while(&pool->seq, seen);
        seen = atomic_load(&pool->seq);
        if (atomic_load(&pool->stopping)) return NULL;
        if (!enter(pool)) continue;
        take_tasks(pool, worker->thread);
        if (atomic_fetch_sub_explicit(&pool->gate, 1, memory_order_acq_rel) == 1) wake_all(&pool->gate);
    }
}

Pool *pool_create(int threads, bool learns) {
    Pool *pool = aligned_alloc(LINE_BYTES, sizeof *pool);
    if (pool == NULL) return NULL;
    *pool = (Pool){.threads = 1, .learns = learns, .busy = ATOMIC_FLAG_INIT};
    pool->workers = calloc((size_t)threads, sizeof *pool->workers);
    if (pool->workers == NULL) {
        free(pool);
        return NULL;
    }
    /* The main thread takes the signals: Python's handlers run there. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool->threads < threads) {
        Worker *worker = &pool->workers[pool->threads - 1];
        *worker = (Worker){.pool = pool, .thread = pool->threads};
        if (pthread_create(&worker->handle, NULL, work, worker) != 0) break;
        pool->threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (pool->threads < threads) {
        pool_destroy(pool);
        return NULL;
    }
    return pool;
}

void pool_destroy(Pool *pool) {
    atomic_store(&pool->stopping, true);
    atomic_fetch_add(&pool->seq, 1);
    wake_all(&pool->seq);
    for (int i = 0; i < pool->threads - 1; i++) pthread_join(pool->workers[i].handle, NULL);
    free(pool->workers);
    free(pool);
}

int pool_threads(const Pool *pool) { return pool->threads; }

/* NULL: the size needs no choice. */
static Expected *expected_of(Pool *pool, size_t bytes) {
    if (!pool->learns || pool->threads == 1 || bytes >> LEAST_SHARED_LOG2 == 0 || bytes >> MOST_ALONE_LOG2 != 0)
        return NULL;
    int size = 0;
    while (bytes >> (LEAST_SHARED_LOG2 + 1 + size) != 0) size++;
    return &pool->expected[size];
}

bool pool_is_better_alone(Pool *pool, size_t bytes) {
    Expected *expected = expected_of(pool, bytes);
    if (expected == NULL) return pool->threads == 1 || (pool->learns && bytes >> LEAST_SHARED_LOG2 == 0);
    if (expected->alone == 0 || expected->shared == 0) return expected->alone == 0;
    const bool alone = expected->alone < expected->shared;
    const double ratio = alone ? expected->shared / expected->alone : expected->alone / expected->shared;
    if (++expected->calls < RETRY_CALLS * ratio * ratio) return alone;
    expected->calls = 0;
    return !alone;
}

void pool_learn(Pool *pool, size_t bytes, bool alone, double ns) {
    Expected *expected = expected_of(pool, bytes);
    if (expected == NULL) return;
    double *time = alone ? &expected->alone : &expected->shared;
    *time = *time == 0 || ns < *time ? ns : *time + (ns - *time) / SLOWER_PART;
}

void pool_run(Pool *pool, Task *task, void *context, int tasks) {
    if (pool->threads == 1 || tasks < 2 || atomic_flag_test_and_set_explicit(&pool->busy, memory_order_acquire)) {
        for (int i = 0; i < tasks; i++) task(context, i, 0);
        return;
    }
    pool->task = task;
    pool->context = context;
    pool->tasks = tasks;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    atomic_store_explicit(&pool->gate, OPEN, memory_order_release);
    atomic_fetch_add(&pool->seq, 1);
    wake_all(&pool->seq);
    take_tasks(pool, 0);
    unsigned inside = atomic_fetch_sub_explicit(&pool->gate, OPEN, memory_order_acq_rel) - OPEN;
    for (; inside != 0; inside = atomic_load_explicit(&pool->gate, memory_order_acquire))
        sleep_while(&pool->gate, inside);
    atomic_flag_clear_explicit(&pool->busy, memory_order_release);
}
