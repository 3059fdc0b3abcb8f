/* bfloat16 products of 1 to 4 rows with FMA, bit for bit equal to the tiles' (gemm_amx.c).
 *
 * FMA keeps up with memory. Tiles do not if another process uses the core's other hardware thread: then a tile load
 * takes three times as long and does not overlap with products.
 *
 * For each tile of 32 inputs, TDPBF16PS sums the even and the odd ones separately, with FMA and from zero. It adds both
 * sums, and the result to c. It rounds to nearest and treats subnormals as zero (Intel 64 and IA-32 Architectures
 * Software Developer's Manual, volume 2, TDPBF16PS).
 */
#include "native.h"

#ifdef __x86_64__
#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f")))
#define INLINE static inline __attribute__((always_inline))
#define MOST_ROWS AMX_FEW_ROWS
/* Several panels at once: memory is read faster in several streams. */
#define MOST_PANELS 4
/* With more rows, the registers hold the sums of either the even or the odd inputs: the second pass reads the tile from
 * the L1 cache. */
#define MOST_ROWS_AT_ONCE 2
#define UPPER_HALF ((int)0xffff0000)
#define STEP_K 32
#define STEP_BYTES (STEP_K * 2)
#define TILE_BYTES (PANEL * STEP_BYTES)
#define AS_TILES_ROUND 0x9fc0 /* MXCSR: round to nearest, FTZ and DAZ, no exceptions. */
_Static_assert(MOST_ROWS == 4, "all_panels has a case for each");

/* `rows` and `panels` are constants after inlining, so that the sums stay in registers. */
#define ROWS_AND_PANELS                                                                                            \
    _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) _Pragma("GCC unroll 4") for (int p = 0; p < panels; p++)

/* Sums the even inputs, the odd ones, or both (constants, too) of one tile of each panel. */
AVX512 INLINE void sum_tile(const int rows, const int panels, const bool evens, const bool odds,
                            float (*x_even)[PANEL], float (*x_odd)[PANEL], const char *w, size_t panel_bytes,
                            __m512 (*even)[MOST_PANELS], __m512 (*odd)[MOST_PANELS]) {
    for (int i = 0; i < STEP_K / 2; i++)
        _Pragma("GCC unroll 4") for (int p = 0; p < panels; p++) {
            const __m512i pairs = _mm512_load_si512(w + (size_t)p * panel_bytes + (size_t)i * LINE_BYTES);
            const __m512 w_even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
            const __m512 w_odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(UPPER_HALF)));
            _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {
                if (evens) even[r][p] = _mm512_fmadd_ps(_mm512_set1_ps(x_even[r][i]), w_even, even[r][p]);
                if (odds) odd[r][p] = _mm512_fmadd_ps(_mm512_set1_ps(x_odd[r][i]), w_odd, odd[r][p]);
            }
        }
}

AVX512 INLINE void block(const int rows, const int panels, const char *x, size_t x_stride, const char *w,
                         size_t panel_bytes, int k, float *c, size_t ldc) {
    float x_even[MOST_ROWS][PANEL] __attribute__((aligned(LINE_BYTES)));
    float x_odd[MOST_ROWS][PANEL] __attribute__((aligned(LINE_BYTES)));
    __m512 sum[MOST_ROWS][MOST_PANELS];
    ROWS_AND_PANELS sum[r][p] = _mm512_setzero_ps();
    for (int step = 0; step < k / STEP_K; step++, x += STEP_BYTES, w += TILE_BYTES) {
        /* A bfloat16 is the upper half of a float32. */
        for (int r = 0; r < rows; r++) {
            const __m512i pairs = _mm512_loadu_si512(x + (size_t)r * x_stride);
            _mm512_store_si512(x_even[r], _mm512_slli_epi32(pairs, 16));
            _mm512_store_si512(x_odd[r], _mm512_and_si512(pairs, _mm512_set1_epi32(UPPER_HALF)));
        }
        __m512 even[MOST_ROWS][MOST_PANELS], odd[MOST_ROWS][MOST_PANELS];
        ROWS_AND_PANELS even[r][p] = odd[r][p] = _mm512_setzero_ps();
        if (rows <= MOST_ROWS_AT_ONCE) {
            sum_tile(rows, panels, true, true, x_even, x_odd, w, panel_bytes, even, odd);
        } else {
            sum_tile(rows, panels, true, false, x_even, x_odd, w, panel_bytes, even, odd);
            sum_tile(rows, panels, false, true, x_even, x_odd, w, panel_bytes, even, odd);
        }
        ROWS_AND_PANELS sum[r][p] = _mm512_add_ps(sum[r][p], _mm512_add_ps(even[r][p], odd[r][p]));
    }
    ROWS_AND_PANELS _mm512_storeu_ps(c + (size_t)r * ldc + p * PANEL, sum[r][p]);
}

#define CASE(ROWS, PANELS)                                                                                         \
    case ROWS * 8 + PANELS: block(ROWS, PANELS, x, x_stride, w, panel_bytes, k, c, ldc); break;
#define CASES(ROWS) CASE(ROWS, 1) CASE(ROWS, 2) CASE(ROWS, 3) CASE(ROWS, 4)

/* Not inlined: the arithmetic must not move across the changes of MXCSR. */
AVX512 static __attribute__((noinline)) void all_panels(const char *x, size_t x_stride, int m, const char *w,
                                                        size_t panel_bytes, int panels, int k, float *c, size_t ldc) {
    for (int p = 0; p < panels; p += MOST_PANELS, w += MOST_PANELS * panel_bytes, c += MOST_PANELS * PANEL)
        switch (m * 8 + (panels - p < MOST_PANELS ? panels - p : MOST_PANELS)) {
            CASES(1) CASES(2) CASES(3) CASES(4)
        }
}

void gemm_amx_bf16_few(const char *x, size_t x_stride, int m, const char *w, size_t panel_bytes, int panels, int k,
                       float *c, size_t ldc) {
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(AS_TILES_ROUND);
    all_panels(x, x_stride, m, w, panel_bytes, panels, k, c, ldc);
    _mm_setcsr(mode);
}
#endif
