/* How a persistent device kernel (persistent.cu) polls slots in host memory.
 *
 * It is the protocol of compiled code on the CPU (expert_server/transports/slot_ownership.py). A slot has three
 * words on lines of their own: its flag (eaas/wire/slot.py), whether the device is busy with it, and its owner's
 * generation, 0 without an owner.
 *
 *     device                                      host
 *     D1  sees WRITTEN                            S1  revoke: generation = 0, flag = OFFLINE
 *     D2  busy = 1, then reads the generation     S2  grant, once busy is 0: flag = OFFLINE, generation,
 *     D3  reads the flag again                        flag = FREE
 *     D4  reads the request, writes the result,
 *         reads the flag, and if it is WRITTEN: DONE
 *     D5  busy = 0
 *
 * D2 and S1/S2 each write one word and then read the other's, in one total order: so either the device finds no
 * owner (or the next one), or the host finds the slot busy. Between D2 and D5 the slot is not granted. If S1 comes
 * after D3, the answer is dropped: D4 finds OFFLINE, or its DONE is overwritten before the slot is granted.
 *
 * The device exchanges nothing atomically: over PCIe its atomic operations on host memory need not be atomic to the
 * host (CUDA C++ Programming Guide, `hostNativeAtomicSupported`).
 *
 * The same text compiles for a device (NVRTC) and for threads of the host.
 */
#pragma once

#ifdef __CUDACC_RTC__
typedef unsigned int word;
#define POLL static __device__ __forceinline__
POLL word load_acquire(const word *at)
{
    word value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
POLL void store_release(word *at, word value)
{
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
POLL void store_then_order(word *at, word value)
{
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;\n\tfence.sc.sys;" ::"l"(at), "r"(value) : "memory");
}
POLL word load_in_order(const word *at)
{
    asm volatile("fence.sc.sys;" ::: "memory");
    return load_acquire(at);
}
#else
#include <stdint.h>
typedef uint32_t word;
#define POLL static inline
POLL word load_acquire(const word *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
POLL void store_release(word *at, word value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
POLL void store_then_order(word *at, word value) { __atomic_store_n(at, value, __ATOMIC_SEQ_CST); }
POLL word load_in_order(const word *at) { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
#endif

enum { POLL_FREE, POLL_WRITTEN, POLL_DONE, POLL_OFFLINE };

struct PolledSlot {
    word *flag, *busy, *generation;
};

/* D1 to D3. Returns the owner's generation if there is a request; the slot is then the device's until `finish`. */
POLL word claim(const PolledSlot &slot)
{
    if (load_acquire(slot.flag) != POLL_WRITTEN) {
        return 0;
    }
    store_then_order(slot.busy, 1);
    word owner = load_in_order(slot.generation);
    /* Again: the slot may have been revoked and granted since. */
    if (owner != 0 && load_acquire(slot.flag) == POLL_WRITTEN) {
        return owner;
    }
    store_release(slot.busy, 0);
    return 0;
}

/* The end of D4, and D5, once all lanes have written the result. Whether the answer counts. */
POLL bool finish(const PolledSlot &slot)
{
    bool counts = load_acquire(slot.flag) == POLL_WRITTEN;
    if (counts) {
        store_release(slot.flag, POLL_DONE);
    }
    store_release(slot.busy, 0);
    return counts;
}

#ifndef __CUDACC_RTC__

/* S1. */
POLL void revoke(const PolledSlot &slot)
{
    store_then_order(slot.generation, 0);
    store_then_order(slot.flag, POLL_OFFLINE);
}

/* S2. False: the device is busy with the slot; try again later. */
POLL bool grant(const PolledSlot &slot, word generation)
{
    if (load_in_order(slot.busy) != 0) {
        return false;
    }
    store_release(slot.flag, POLL_OFFLINE);
    store_then_order(slot.generation, generation);
    store_release(slot.flag, POLL_FREE);
    return true;
}

#endif
