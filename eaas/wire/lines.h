/* Lines of the arena that order its bytes: a flag of a slot, and a bell that waiters sleep on (`_flags.c`). */
#ifndef EAAS_WIRE_LINES_H
#define EAAS_WIRE_LINES_H

#include <limits.h>
#include <linux/futex.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LINE_BYTES 64

typedef struct {
    uint32_t value;
    uint32_t unused[15];
} FlagLine;

typedef struct {
    uint32_t seq;
    uint32_t sleepers;
    uint32_t unused[14];
} BellLine;

_Static_assert(sizeof(FlagLine) == LINE_BYTES, "a flag has a cache line of its own");
_Static_assert(sizeof(BellLine) == LINE_BYTES, "a bell has a cache line of its own");

/* The futexes are shared (not FUTEX_PRIVATE): the sleeper may be another process. */
static inline void
bump_and_wake(BellLine *bell)
{
    __atomic_fetch_add(&bell->seq, 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, &bell->seq, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Wake the sleepers of a bell, after a flag was set. */
static inline void
ring_bell(BellLine *bell)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(&bell->sleepers, __ATOMIC_RELAXED) != 0) {
        bump_and_wake(bell);
    }
}

/* Set a flag to `value` if it is `expected`: later reads and earlier writes stay on their side. */
static inline bool
exchange_flag(FlagLine *flag, uint32_t expected, uint32_t value)
{
    return __atomic_compare_exchange_n(&flag->value, &expected, value, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE);
}

#endif
