/* Tiles of Intel AMX: which of their instructions work here. Tests without such a CPU compile this code with
 * AMX_EMULATION, the name of a header that defines the intrinsics and CPU_HAS_TILES. */
#pragma once
#include <immintrin.h>
#include <stdbool.h>

#ifdef AMX_EMULATION
#include AMX_EMULATION
#else
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

/* Linux permits tiles only on request. */
static inline bool linux_permits_tiles(void) {
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

#define CPU_HAS_TILES(FEATURE)                                                                                     \
    (__builtin_cpu_supports("amx-tile") && __builtin_cpu_supports(FEATURE) && linux_permits_tiles())
#endif
