/* Tiles of Intel AMX: which of their instructions work here, and the sizes of a thread's tiles. Tests without such a CPU
 * compile this code with AMX_EMULATION, the name of a header that defines the intrinsics and CPU_HAS_TILES. */
#pragma once
#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

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

/* Whether tiles of bfloat16 and AVX512-BF16, for what surrounds them, work here. Asked once. */
static inline bool bfloat16_tiles_work(void) {
    static int known; /* 1: no, 2: yes */
    int is_known = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (is_known == 0) {
        const bool works = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512vl") && CPU_HAS_TILES("amx-bf16");
        is_known = works ? 2 : 1;
        __atomic_store_n(&known, is_known, __ATOMIC_RELAXED);
    }
    return is_known == 2;
}

/* Until `_tile_release` the thread's 8 tiles have these sizes. */
__attribute__((target("amx-tile"))) static inline void amx_configure(const uint8_t rows[8], const uint8_t bytes_per_row[8]) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes_per_row[16];
        uint8_t rows[16];
    } config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int t = 0; t < 8; t++) {
        config.bytes_per_row[t] = bytes_per_row[t];
        config.rows[t] = rows[t];
    }
    /* GCC's intrinsic declares only the first 8 bytes as read, so stores to the rest would be dropped. */
    __asm__ volatile("" ::"m"(config));
    _tile_loadconfig(&config);
}

/* Transpose 4 by 4 words in each quarter. */
__attribute__((target("avx512f"), always_inline)) static inline void transpose_lanes(__m512i *r) {
    const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]), b = _mm512_unpackhi_epi32(r[0], r[1]);
    const __m512i c = _mm512_unpacklo_epi32(r[2], r[3]), d = _mm512_unpackhi_epi32(r[2], r[3]);
    r[0] = _mm512_unpacklo_epi64(a, c);
    r[1] = _mm512_unpackhi_epi64(a, c);
    r[2] = _mm512_unpacklo_epi64(b, d);
    r[3] = _mm512_unpackhi_epi64(b, d);
}

/* Transpose 16 by 16 words: what two tiles hold as rows and as columns. */
__attribute__((target("avx512f"), always_inline)) static inline void transpose_words(__m512i *r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 4) transpose_lanes(r + i);
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}
