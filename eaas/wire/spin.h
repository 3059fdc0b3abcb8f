/* Spin-wait helpers: a pause of the core, and a clock. */
#ifndef EAAS_WIRE_SPIN_H
#define EAAS_WIRE_SPIN_H

#include <stdint.h>
#include <time.h>

static inline void
cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    /* "yield" is a no-op on most cores; "isb" stalls about as long as x86's pause. */
    __asm__ __volatile__("isb" ::: "memory");
#else
    __asm__ __volatile__("" ::: "memory");
#endif
}

static inline uint64_t
now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

#endif
