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

#define KINDS_OF_FLOAT_ROWS(ISA, LEVEL)                                                                            \
    {ISA, LEVEL##_works, BFLOAT16, FLOAT32, gemm_bf16_##LEVEL, NULL},                                              \
    {ISA, LEVEL##_works, FLOAT32, FLOAT32, gemm_f32_##LEVEL, NULL},                                                \
    {ISA, LEVEL##_works, INT8, FLOAT32, gemm_int8_##LEVEL, NULL},                                                  \
    {ISA, LEVEL##_works, INT4, FLOAT32, gemm_int4_##LEVEL, NULL},                                                  \
    {ISA, LEVEL##_works, INT4_GROUPS, FLOAT32, gemm_int4_groups_##LEVEL, NULL},                                    \
    {ISA, LEVEL##_works, INT4_SHORT, FLOAT32, gemm_int4_short_##LEVEL, NULL},                                      \
    {ISA, LEVEL##_works, INT8_GROUPS, FLOAT32, gemm_int8_groups_##LEVEL, NULL},                                    \
    {ISA, LEVEL##_works, INT8_ZEROS, FLOAT32, gemm_int8_zeros_##LEVEL, NULL},                                      \
    {ISA, LEVEL##_works, FP8, FLOAT32, gemm_fp8_##LEVEL, NULL},                                                    \
    {ISA, LEVEL##_works, MXFP4, FLOAT32, gemm_mxfp4_##LEVEL, NULL}

const GemmKind gemm_kinds[] = {
#ifdef __x86_64__
    {"amx-bf16", amx_works, BFLOAT16, BFLOAT16, gemm_amx_bf16, gemm_amx_bf16_ahead},
    {"avx512-bf16", avx512_bf16_works, BFLOAT16, BFLOAT16, gemm_avx512_bf16, NULL},
    {"avx512", avx512_works, FLOAT32, FLOAT32, gemm_avx512_f32, NULL},
    {"amx-bf16", amx_works, FP8, BFLOAT16, gemm_amx_fp8, NULL},
    {"amx-bf16", amx_works, MXFP4, BFLOAT16, gemm_amx_mxfp4, NULL},
    {"avx512-bf16", avx512_codes_works, FP8, BFLOAT16, gemm_avx512_fp8, NULL},
    {"avx512-bf16", avx512_codes_works, MXFP4, BFLOAT16, gemm_avx512_mxfp4, NULL},
    {"amx-int8", amx_int8_works, INT8, SPLIT, gemm_amx_int8, NULL},
    {"amx-int8", amx_int8_works, INT4, SPLIT, gemm_amx_int4, NULL},
    {"amx-int8", amx_int8_works, INT4_GROUPS, SPLIT, gemm_amx_int4_groups, NULL},
    {"amx-int8", amx_int8_works, INT4_SHORT, SPLIT, gemm_amx_int4_short, NULL},
    {"amx-int8", amx_int8_works, INT8_GROUPS, SPLIT, gemm_amx_int8_groups, NULL},
    {"amx-int8", amx_int8_works, INT8_ZEROS, SPLIT, gemm_amx_int8_zeros, NULL},
    {"avx512-vnni", vnni_works, INT8, SPLIT, gemm_vnni_int8, NULL},
    {"avx512-vnni", vnni_works, INT4, SPLIT, gemm_vnni_int4, NULL},
    {"avx512-vnni", vnni_works, INT4_GROUPS, SPLIT, gemm_vnni_int4_groups, NULL},
    {"avx512-vnni", vnni_works, INT4_SHORT, SPLIT, gemm_vnni_int4_short, NULL},
    {"avx512-vnni", vnni_works, INT8_GROUPS, SPLIT, gemm_vnni_int8_groups, NULL},
    {"avx512-vnni", vnni_works, INT8_ZEROS, SPLIT, gemm_vnni_int8_zeros, NULL},
    KINDS_OF_FLOAT_ROWS("avx2", avx2),
#endif
    KINDS_OF_FLOAT_ROWS("portable", plain),
    {0},
};
