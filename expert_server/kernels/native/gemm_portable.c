/* Products for all other CPUs: AVX2 if available, else generic compiler vectors. */
#include "native.h"

typedef float Float8 __attribute__((vector_size(32)));
typedef float Float8u __attribute__((vector_size(32), aligned(4)));
typedef uint32_t Word8 __attribute__((vector_size(32)));

#define ROWS 4
#define AHEAD_BYTES 2048
#define BLOCK_LINES 256 /* Of one panel: 16 KiB. */

#ifdef __x86_64__
#define TARGET __attribute__((target("avx2,fma")))
#define NAME(what) what##_avx2
#define gemm_f32_avx2 gemm_avx2_f32
#define gemm_bf16_avx2 gemm_avx2_bf16
#include "gemm_portable.h"
bool avx2_works(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

#define TARGET
#define NAME(what) what##_plain
#define gemm_f32_plain gemm_plain_f32
#define gemm_bf16_plain gemm_plain_bf16
#include "gemm_portable.h"
bool plain_works(void) { return true; }

const GemmKind gemm_kinds[] = {
#ifdef __x86_64__
    {"amx-bf16", amx_works, BFLOAT16, BFLOAT16, gemm_amx_bf16},
    {"avx512-bf16", avx512_bf16_works, BFLOAT16, BFLOAT16, gemm_avx512_bf16},
    {"avx512", avx512_works, FLOAT32, FLOAT32, gemm_avx512_f32},
    {"avx2", avx2_works, BFLOAT16, FLOAT32, gemm_avx2_bf16},
    {"avx2", avx2_works, FLOAT32, FLOAT32, gemm_avx2_f32},
    {"amx-int8", amx_int8_works, INT8, SPLIT, gemm_amx_int8},
    {"amx-int8", amx_int8_works, INT4, SPLIT, gemm_amx_int4},
    {"avx512-vnni", vnni_works, INT8, SPLIT, gemm_vnni_int8},
    {"avx512-vnni", vnni_works, INT4, SPLIT, gemm_vnni_int4},
    {"avx2", avx2_works, INT8, FLOAT32, gemm_avx2_int8},
    {"avx2", avx2_works, INT4, FLOAT32, gemm_avx2_int4},
#endif
    {"portable", plain_works, BFLOAT16, FLOAT32, gemm_plain_bf16},
    {"portable", plain_works, FLOAT32, FLOAT32, gemm_plain_f32},
    {"portable", plain_works, INT8, FLOAT32, gemm_plain_int8},
    {"portable", plain_works, INT4, FLOAT32, gemm_plain_int4},
    {0},
};
