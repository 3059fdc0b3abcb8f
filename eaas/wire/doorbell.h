/* Flags, doorbells and waits in shared memory, without Python.
 *
 *     flag line (64 bytes)   | value u32 | unused                 |   one per slot
 *     doorbell line (64 bytes)   | seq u32   | sleepers u32 | unused  |   one per group of waiters
 *
 * A waiter sleeps on a doorbell (an eventcount: a futex on seq), so that one sleep covers many flags.
 *
 * Why no wake-up is lost:
 *
 *     waiter                                   ringer
 *     W1  sleepers += 1                        R1  flag = value   (before ring() is called)
 *     W2  full fence                           R2  full fence
 *     W3  s = seq                              R3  if sleepers == 0: return
 *     W4  check the flags again                R4  seq += 1
 *     W5  FUTEX_WAIT(seq, s)                   R5  FUTEX_WAKE(seq, all)
 *
 * The two fences make it impossible that R3 misses W1 and W4 misses R1. If R3 sees the sleeper, then either
 * W3 reads the seq of R4, and with it R1 (release/acquire), so that W4 sees the flag; or W3 reads the older
 * seq, and W5 returns at once (the kernel compares) or is woken by R5.
 *
 * A process killed in its sleep leaves sleepers too high. That costs one system call per ring, but no error.
 */
#ifndef EAAS_WIRE_DOORBELL_H
#define EAAS_WIRE_DOORBELL_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "spin.h"

#define LINE_BYTES 64
#define MAX_VALUE 31                         /* A mask is a u32 with one bit per value. */
#define SIGNAL_CHECK_NS UINT64_C(250000000)  /* Longest delay of a Ctrl-C. */
#define CHECKS_PER_CLOCK_READ 16             /* A clock read costs more than a check of a flag. */
/* Limit of a longer spin that is likely to avoid a sleep: a wake-up costs both sides more than the spin. */
#define SPIN_STRETCH 10
#define USUAL_WEIGHT 8 /* Weight of one wait in the average: an eighth. */
/* After so many spins in a row that ended in a sleep, only every SPIN_PROBE-th wait spins. */
#define SPIN_USELESS 8
#define SPIN_PROBE 64

typedef struct {
    uint32_t value;
    uint32_t unused[15];
} FlagLine;

typedef struct {
    uint32_t seq;
    uint32_t sleepers;
    uint32_t unused[14];
} Doorbell;

_Static_assert(sizeof(FlagLine) == LINE_BYTES, "a flag has a cache line of its own");
_Static_assert(sizeof(Doorbell) == LINE_BYTES, "a doorbell has a cache line of its own");

/* ---- waiting, without Python ------------------------------------------------------------------------- */

typedef struct {
    const FlagLine *flags; /* the first flag to check */
    ptrdiff_t count;
    uint32_t mask;
    Doorbell *doorbell;
    int64_t seen_seq; /* negative: ignore the doorbell's seq */
    uint64_t spin_until_ns;
    uint64_t deadline_ns;
} Wait;

typedef enum {
    WAIT_READY,       /* a flag has a value of the mask */
    WAIT_RUNG,        /* seq differs from seen_seq */
    WAIT_EXPIRED,     /* the deadline has passed */
    WAIT_INTERRUPTED, /* check for signals, then continue */
} Outcome;

/* The futexes are shared (not FUTEX_PRIVATE): the sleeper may be another process. */

static inline int
futex_wait(uint32_t *word, uint32_t expected, uint64_t timeout_ns)
{
    struct timespec timeout = {
        .tv_sec = (time_t)(timeout_ns / UINT64_C(1000000000)),
        .tv_nsec = (long)(timeout_ns % UINT64_C(1000000000)),
    };
    if (syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, NULL, 0) == 0) {
        return 0;
    }
    return errno;
}

static inline void
futex_wake_all(uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static inline void
bump_and_wake(Doorbell *doorbell)
{
    __atomic_fetch_add(&doorbell->seq, 1, __ATOMIC_SEQ_CST);
    futex_wake_all(&doorbell->seq);
}

static inline bool
flag_matches(const FlagLine *flag, uint32_t mask)
{
    uint32_t value = __atomic_load_n(&flag->value, __ATOMIC_ACQUIRE);
    /* A peer can write any u32 there; a shift by more than 31 is undefined. */
    return value <= MAX_VALUE && ((mask >> value) & 1u) != 0;
}

static inline bool
any_ready(const Wait *wait)
{
    for (ptrdiff_t i = 0; i < wait->count; i++) {
        if (flag_matches(&wait->flags[i], wait->mask)) {
            return true;
        }
    }
    return false;
}

static inline bool
doorbell_rung(const Wait *wait)
{
    if (wait->seen_seq < 0) {
        return false;
    }
    return __atomic_load_n(&wait->doorbell->seq, __ATOMIC_ACQUIRE) != (uint32_t)wait->seen_seq;
}

/* Sleep until a ring, at most timeout_ns. Returns 0 or the errno of FUTEX_WAIT. */
static inline int
sleep_on_doorbell(const Wait *wait, uint64_t timeout_ns)
{
    int error = 0;
    __atomic_fetch_add(&wait->doorbell->sleepers, 1, __ATOMIC_SEQ_CST);
    /* Not implied on AArch64: there a load may still pass the store half of the addition. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    uint32_t seq = __atomic_load_n(&wait->doorbell->seq, __ATOMIC_ACQUIRE);
    if (!any_ready(wait) && !doorbell_rung(wait)) {
        error = futex_wait(&wait->doorbell->seq, seq, timeout_ns);
    }
    __atomic_fetch_sub(&wait->doorbell->sleepers, 1, __ATOMIC_SEQ_CST);
    return error;
}

/* Spin, then sleep, at most SIGNAL_CHECK_NS. Runs without the GIL. */
static inline Outcome
wait_slice(const Wait *wait)
{
    uint64_t now = now_ns();
    uint64_t slice_end = now + SIGNAL_CHECK_NS;
    if (slice_end > wait->deadline_ns) {
        slice_end = wait->deadline_ns;
    }
    while (now < slice_end && now < wait->spin_until_ns) {
        for (int i = 0; i < CHECKS_PER_CLOCK_READ; i++) {
            if (any_ready(wait)) {
                return WAIT_READY;
            }
            if (doorbell_rung(wait)) {
                return WAIT_RUNG;
            }
            cpu_relax();
        }
        now = now_ns();
    }
    /* A ring for another flag ends one iteration, and the next one sleeps again. */
    while (now < slice_end) {
        int error = sleep_on_doorbell(wait, slice_end - now);
        if (any_ready(wait)) {
            return WAIT_READY;
        }
        if (doorbell_rung(wait)) {
            return WAIT_RUNG;
        }
        if (error == EINTR) {
            return WAIT_INTERRUPTED;
        }
        now = now_ns();
    }
    return now >= wait->deadline_ns ? WAIT_EXPIRED : WAIT_INTERRUPTED;
}

/* Set a flag first. Without sleepers this costs only a fence. */
static inline void
ring_doorbell(Doorbell *doorbell)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(&doorbell->sleepers, __ATOMIC_RELAXED) != 0) {
        bump_and_wake(doorbell);
    }
}

/* ---- how long to spin --------------------------------------------------------------------------------- */

typedef struct {
    uint64_t usual_ns; /* average duration of waits, bounded */
    uint32_t useless;  /* spins in a row that ended in a sleep */
} SpinHistory;

/* Spin twice the usual duration of a wait, if that is within the stretch; else a longer spin only burns the core.
 * Do not spin where it never helped: the other side may share this core, and runs only while this one sleeps. */
static inline uint64_t
spin_for(SpinHistory *history, uint64_t asked_ns)
{
    if (history->useless >= SPIN_USELESS && history->useless % SPIN_PROBE != 0) {
        history->useless++;
        return 0;
    }
    uint64_t wanted = 2 * history->usual_ns;
    return wanted > asked_ns && wanted <= SPIN_STRETCH * asked_ns ? wanted : asked_ns;
}

static inline void
learn_spin(SpinHistory *history, uint64_t waited_ns, uint64_t spun_ns, uint64_t asked_ns)
{
    /* Bounded, so that the average soon falls after a long pause. */
    uint64_t most_ns = SPIN_STRETCH * asked_ns;
    uint64_t sample = waited_ns < most_ns ? waited_ns : most_ns;
    history->usual_ns = history->usual_ns - history->usual_ns / USUAL_WEIGHT + sample / USUAL_WEIGHT;
    if (spun_ns > 0) {
        history->useless = waited_ns <= spun_ns ? 0 : history->useless + 1;
    }
}

#endif
