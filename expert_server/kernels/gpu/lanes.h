/* What the persistent kernel needs of its place: lanes, memory orders, warps. On a device, and on threads of the host,
 * where a warp has one lane.
 */
#pragma once

#ifdef __CUDACC_RTC__
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#endif

#include "poll.h"

#ifdef __CUDACC_RTC__
#define LANE threadIdx.x
#define LANES blockDim.x
#define BLOCK blockIdx.x
#define BLOCKS gridDim.x
#define WARP 32u
#define UNROLL _Pragma("unroll")
POLL void sync_block() { __syncthreads(); }
POLL void rest() { __nanosleep(20); }
/* Between blocks: memory of the device. */
POLL word load_device(const word *at)
{
    word value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
POLL void add_device(word *at)
{
    asm volatile("fence.acq_rel.gpu;\n\tred.release.gpu.global.add.u32 [%0], 1;" ::"l"(at) : "memory");
}
POLL void store_once(word *at, word value)
{
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
/* Of the host's memory, past the caches. */
POLL word load_host(const word *at)
{
    word value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}
POLL uint64_t load_address(const uint64_t *at)
{
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}
POLL void store_host(word *at, word value)
{
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
POLL void fence_host() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
POLL float from_bits(word bits) { return __uint_as_float(bits); }
POLL word to_bits(float value) { return __float_as_uint(value); }
POLL float warp_sum(float value)
{
    for (int other = 16; other != 0; other /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, other);
    }
    return value;
}
/* The first lane of the warp for which it holds; WARP: none. */
POLL word warp_first(bool holds)
{
    word lanes = __ballot_sync(0xffffffffu, holds);
    return lanes == 0 ? WARP : __ffs(lanes) - 1;
}
/* What lane 0 of the warp has. */
POLL word warp_broadcast(word value) { return __shfl_sync(0xffffffffu, value, 0); }
#else
#include <math.h>
#include <string.h>
/* Where this thread is. The program that includes this defines both functions. */
struct Place {
    word lane, lanes, block, blocks;
};
static thread_local Place place;
static void sync_block();
static void rest();
#define LANE place.lane
#define LANES place.lanes
#define BLOCK place.block
#define BLOCKS place.blocks
#define WARP 1u
#define UNROLL
POLL word load_device(const word *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
POLL void add_device(word *at) { __atomic_fetch_add(at, 1, __ATOMIC_ACQ_REL); }
POLL void store_once(word *at, word value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
POLL word load_host(const word *at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
POLL uint64_t load_address(const uint64_t *at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
POLL void store_host(word *at, word value) { __atomic_store_n(at, value, __ATOMIC_RELAXED); }
POLL void fence_host() {}
POLL float from_bits(word bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
POLL word to_bits(float value)
{
    word bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
POLL float warp_sum(float value) { return value; }
POLL word warp_first(bool holds) { return holds ? 0 : WARP; }
POLL word warp_broadcast(word value) { return value; }
#endif
