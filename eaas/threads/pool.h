/* A pool of threads that share numbered tasks. */
#pragma once
#include <stdbool.h>
#include <stddef.h>

/* Name of a capsule with a pool, in Python. */
#define POOL_CAPSULE "eaas.threads.Pool"

typedef struct Pool Pool;
typedef void Task(void *context, int task, int thread);

/* NULL if there is no memory or no thread. `threads` includes the caller. `learns`: whether it learns which work the
 * caller does sooner alone; if not, all threads share all work. */
Pool *pool_create(int threads, bool learns);
void pool_destroy(Pool *pool);
int pool_threads(const Pool *pool);
/* Whether the caller does work of this size (bytes that it reads, counted once for each time) sooner without the other
 * threads, as far as the pool has learnt. */
bool pool_is_better_alone(Pool *pool, size_t bytes);
/* Tells the pool how long such work took. */
void pool_learn(Pool *pool, size_t bytes, bool alone, double ns);
/* Calls task(context, 0 .. tasks - 1, thread), each once, on any free thread; returns when all are done.
 * A second caller at the same time does its tasks alone. */
void pool_run(Pool *pool, Task *task, void *context, int tasks);
