/* Products with AVX-512: float32 with FMA, bfloat16 with its dot product (AVX512-BF16). */
#include "native.h"

#ifdef __x86_64__
#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f")))
#define AVX512_BF16 __attribute__((target("avx512f,avx512bf16")))
#define INLINE static inline __attribute__((always_inline))

/* 6 rows by 2 panels, each with two sums: 24 sums, 4 vectors of weights and one of x nearly fill the 32 registers. */
#define ROWS 6
#define PANELS 2
/* Prefetch distance: the hardware prefetcher stops at each 4 KiB page. */
#define AHEAD_BYTES 4096
#ifndef OUTER_STEPS
#define OUTER_STEPS 768 /* 128 rows of x: 384 KiB. */
#endif
#ifndef INNER_STEPS
#define INNER_STEPS 192 /* Lines of two panels: 24 KiB. */
#endif

bool avx512_works(void) { return __builtin_cpu_supports("avx512f"); }
bool avx512_bf16_works(void) { return avx512_works() && __builtin_cpu_supports("avx512bf16"); }

/* One block. `rows` and `panels` are constants after inlining, so that the sums stay in registers.
 * A step is one line of each panel: one k of float32, two of bfloat16. Even and odd steps have sums of their own: a
 * single row of a single panel would wait for the latency of its one sum. */
#define BLOCK(NAME, TARGET, MULTIPLY_ADD)                                                                          \
    TARGET INLINE void NAME(const int rows, const int panels, const char *x, size_t x_stride, const char *w,       \
                            size_t panel_bytes, int steps, float *c, size_t ldc, bool add) {                       \
        __m512 sum[ROWS][PANELS][2];                                                                               \
        _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++)                                                     \
            _Pragma("GCC unroll 2") for (int p = 0; p < panels; p++)                                               \
                sum[r][p][0] = sum[r][p][1] = _mm512_setzero_ps();                                                 \
        for (int step = 0; step < steps; step += 2) {                                                              \
            __m512i line[PANELS][2];                                                                               \
            _Pragma("GCC unroll 2") for (int p = 0; p < panels; p++)                                               \
                _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) {                                              \
                    const char *at = w + (size_t)p * panel_bytes + (size_t)(step + i) * LINE_BYTES;                \
                    _mm_prefetch(at + AHEAD_BYTES, _MM_HINT_T0);                                                   \
                    line[p][i] = _mm512_load_si512(at);                                                            \
                }                                                                                                  \
            _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++)                                                 \
                _Pragma("GCC unroll 2") for (int i = 0; i < 2; i++) {                                              \
                    const char *at = x + r * x_stride + (size_t)(step + i) * 4;                                    \
                    const __m512i value = _mm512_set1_epi32(*(const int *)at);                                     \
                    _Pragma("GCC unroll 2") for (int p = 0; p < panels; p++)                                       \
                        sum[r][p][i] = MULTIPLY_ADD(sum[r][p][i], value, line[p][i]);                              \
                }                                                                                                  \
        }                                                                                                          \
        _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++)                                                     \
            _Pragma("GCC unroll 2") for (int p = 0; p < panels; p++) {                                             \
                float *to = c + r * ldc + p * PANEL;                                                               \
                const __m512 both = _mm512_add_ps(sum[r][p][0], sum[r][p][1]);                                     \
                _mm512_storeu_ps(to, add ? _mm512_add_ps(_mm512_loadu_ps(to), both) : both);                       \
            }                                                                                                      \
    }

#define FMA(sum, value, line) _mm512_fmadd_ps(_mm512_castsi512_ps(value), _mm512_castsi512_ps(line), sum)
#define DOT(sum, value, line) _mm512_dpbf16_ps(sum, (__m512bh)(value), (__m512bh)(line))
BLOCK(block_f32, AVX512, FMA)
BLOCK(block_bf16, AVX512_BF16, DOT)

#define CASE(BLOCK, ROWS, PANELS)                                                                                  \
    case ROWS * 4 + PANELS: BLOCK(ROWS, PANELS, xs, x_stride, ws, panel_bytes, steps, cs, ldc, at > 0); break;
#define CASES(BLOCK, ROWS) CASE(BLOCK, ROWS, 1) CASE(BLOCK, ROWS, 2)

/* Many rows: a section of k whose rows of x stay in the L2 cache; within it two panels, of which a shorter section stays
 * in the L1 cache while all rows use it. Few rows: one panel after the other, strictly forward, since a core reads one
 * stream faster than several. The shorter sections are summed by themselves, whatever the number of rows. */
#define GEMM(NAME, TARGET, BLOCK, STEP_K)                                                                          \
    TARGET void NAME(GEMM_PARAMETERS) {                                                                            \
        const int all = k / STEP_K, outer = m > ROWS ? OUTER_STEPS : all, most = m > ROWS ? PANELS : 1;            \
        for (int from = 0; from < all; from += outer)                                                              \
            for (int p = 0; p < panels; p += most) {                                                               \
                const int to = all - from < outer ? all : from + outer;                                            \
                const int width = panels - p < most ? panels - p : most;                                           \
                for (int at = from; at < to; at += INNER_STEPS)                                                    \
                    for (int row = 0; row < m; row += ROWS) {                                                      \
                        const int rows = m - row < ROWS ? m - row : ROWS;                                          \
                        const int steps = to - at < INNER_STEPS ? to - at : INNER_STEPS;                           \
                        const char *xs = x + (size_t)row * x_stride + (size_t)at * 4;                              \
                        const char *ws = w + (size_t)p * panel_bytes + (size_t)at * LINE_BYTES;                    \
                        float *cs = c + (size_t)row * ldc + p * PANEL;                                             \
                        switch (rows * 4 + width) {                                                                \
                            CASES(BLOCK, 1) CASES(BLOCK, 2) CASES(BLOCK, 3) CASES(BLOCK, 4) CASES(BLOCK, 5)        \
                            CASES(BLOCK, 6)                                                                        \
                        }                                                                                          \
                    }                                                                                              \
            }                                                                                                      \
    }
_Static_assert(OUTER_STEPS % INNER_STEPS == 0 && INNER_STEPS % 2 == 0, "sections are the same for any number of rows");
GEMM(gemm_avx512_f32, AVX512, block_f32, 1)
GEMM(gemm_avx512_bf16, AVX512_BF16, block_bf16, 2)
#endif
