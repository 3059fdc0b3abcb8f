/* Products for all other CPUs with the compiler's vectors: AVX2 if available, else any. */
#include "native.h"

#include <string.h>

#define ROWS 4
#define AHEAD_BYTES 2048
#define BLOCK_LINES 256 /* Of one panel: 16 KiB. */

#ifdef __x86_64__
#define TARGET __attribute__((target("avx2,fma")))
#define NAME(what) what##_avx2
#define VECTOR_BYTES 32
#include "gemm_portable.h"
bool avx2_works(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

#define TARGET
#define NAME(what) what##_plain
#define VECTOR_BYTES 16
#include "gemm_portable.h"
bool plain_works(void) { return true; }

/* Products of each group of formats, and the CPUs that have them. */
#define AVX2(FORMAT, ...) {"avx2", avx2_works, FORMAT, FLOAT32, gemm_##FORMAT##_avx2, NULL},
#define PLAIN(FORMAT, ...) {"portable", plain_works, FORMAT, FLOAT32, gemm_##FORMAT##_plain, NULL},
#define AMX_BF16(FORMAT, ...) {"amx-bf16", amx_works, FORMAT, BFLOAT16, gemm_amx_##FORMAT, NULL},
#define AVX512_BF16(FORMAT, ...) {"avx512-bf16", avx512_codes_works, FORMAT, BFLOAT16, gemm_avx512_##FORMAT, NULL},
#define AMX_INT8(FORMAT, ...) {"amx-int8", amx_int8_works, FORMAT, SPLIT, gemm_amx_##FORMAT, NULL},
#define VNNI(FORMAT, ...) {"avx512-vnni", vnni_works, FORMAT, SPLIT, gemm_vnni_##FORMAT, NULL},

const GemmKind gemm_kinds[] = {
#ifdef __x86_64__
    {"amx-bf16", amx_works, BFLOAT16, BFLOAT16, gemm_amx_bf16, gemm_amx_bf16_ahead},
    {"avx512-bf16", avx512_bf16_works, BFLOAT16, BFLOAT16, gemm_avx512_bf16, NULL},
    {"avx512", avx512_works, FLOAT32, FLOAT32, gemm_avx512_f32, NULL},
    EACH_NARROW_FLOAT(AMX_BF16)
    EACH_NARROW_FLOAT(AVX512_BF16)
    EACH_INTEGER(AMX_INT8)
    EACH_INTEGER(VNNI)
    EACH_FORMAT(AVX2)
#endif
    EACH_FORMAT(PLAIN)
    {0},
};
