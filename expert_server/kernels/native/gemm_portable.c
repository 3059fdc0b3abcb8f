/* Products for all other CPUs with the compiler's vectors: AVX2 if available, else any. */
#include "native.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))
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

const GemmKind gemm_kinds[] = {
#ifdef __x86_64__
    {"amx-bf16", amx_works, BFLOAT16, BFLOAT16, gemm_amx_bf16},
    {"avx512-bf16", avx512_bf16_works, BFLOAT16, BFLOAT16, gemm_avx512_bf16},
    {"avx512", avx512_works, FLOAT32, FLOAT32, gemm_avx512_f32},
    {"avx2", avx2_works, BFLOAT16, FLOAT32, gemm_bf16_avx2},
    {"avx2", avx2_works, FLOAT32, FLOAT32, gemm_f32_avx2},
    {"amx-int8", amx_int8_works, INT8, SPLIT, gemm_amx_int8},
    {"amx-int8", amx_int8_works, INT4, SPLIT, gemm_amx_int4},
    {"avx512-vnni", vnni_works, INT8, SPLIT, gemm_vnni_int8},
    {"avx512-vnni", vnni_works, INT4, SPLIT, gemm_vnni_int4},
    {"avx2", avx2_works, INT8, FLOAT32, gemm_int8_avx2},
    {"avx2", avx2_works, INT4, FLOAT32, gemm_int4_avx2},
#endif
    {"portable", plain_works, BFLOAT16, FLOAT32, gemm_bf16_plain},
    {"portable", plain_works, FLOAT32, FLOAT32, gemm_f32_plain},
    {"portable", plain_works, INT8, FLOAT32, gemm_int8_plain},
    {"portable", plain_works, INT4, FLOAT32, gemm_int4_plain},
    {0},
};
