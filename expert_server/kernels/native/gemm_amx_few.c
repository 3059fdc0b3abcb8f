/* Products of 1 to 4 bfloat16 rows (MXFP4: 1 or 2) with FMA, bit for bit equal to the tiles' (gemm_amx.c).
 *
 * FMA keeps up with memory. Tiles do not if another process uses the core's other hardware thread: then a tile load
 * takes three times as long and does not overlap with products.
 *
 * For each tile of 32 inputs, TDPBF16PS sums the even and the odd ones separately, with FMA and from zero. It adds both
 * sums, and the result to c. It rounds to nearest and treats subnormals as zero (Intel 64 and IA-32 Architectures
 * Software Developer's Manual, volume 2, TDPBF16PS).
 *
 * FP8 and MXFP4 codes are decoded in registers. Each part has its scales as the tiles' lines and sums have.
 */
#include "native.h"

#ifdef __x86_64__
#include "codes.h"

#define FEW __attribute__((target("avx512f,avx512bw,avx512vbmi")))
#define MOST_ROWS AMX_FEW_ROWS
/* Several panels at once: memory is read faster in several streams. */
#define MOST_PANELS 4
/* With more rows, the registers hold the sums of either the even or the odd inputs: the second pass reads the tile from
 * the L1 cache. Codes would be decoded twice: they have both sums of fewer panels. */
#define MOST_ROWS_AT_ONCE 2
#define PANELS_OF_MORE_ROWS 2
#define UPPER_HALF ((int)0xffff0000)
#define STEP_K 32
#define STEP_BYTES (STEP_K * 2)
_Static_assert(MOST_ROWS == 4 && AMX_FEW_ROWS_MXFP4 == 2, "all_panels has a case for each");
_Static_assert(STEP_K == GROUP, "a tile has one scale of MXFP4");

/* `weights`, `rows` and `panels` are constants after inlining, so that the sums stay in registers. */
#define ROWS_AND_PANELS                                                                                            \
    _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) _Pragma("GCC unroll 4") for (int p = 0; p < panels; p++)

/* A line of weights to lines of pairs; `by`: of MXFP4. */
FEW INLINE void decode(const Format weights, __m512i line, __m512i by, __m512i *pairs) {
    if (weights == FP8) {
        decode_fp8(line, pairs);
    } else if (weights == MXFP4) {
        decode_mxfp4(line, large_e2m1, pairs);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) pairs[j] = scale_mxfp4(pairs[j], by);
    } else {
        pairs[0] = line;
    }
}

/* Sums the even inputs, the odd ones, or both (constants, too) of one tile of each panel. */
FEW INLINE void sum_tile(const Format weights, const int rows, const int panels, const bool evens, const bool odds,
                            float (*x_even)[PANEL], float (*x_odd)[PANEL], const char *w, size_t panel_bytes,
                            const __m512i *by, __m512 (*even)[MOST_PANELS], __m512 (*odd)[MOST_PANELS]) {
    for (int i = 0; i < STEP_K / 2; i += PAIRS(weights), w += LINE_BYTES)
        _Pragma("GCC unroll 4") for (int p = 0; p < panels; p++) {
            __m512i pairs[4];
            decode(weights, _mm512_load_si512(w + (size_t)p * panel_bytes), by[p], pairs);
            _Pragma("GCC unroll 4") for (int j = 0; j < PAIRS(weights); j++) {
                const __m512 w_even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs[j], 16));
                const __m512 w_odd = _mm512_castsi512_ps(_mm512_and_si512(pairs[j], _mm512_set1_epi32(UPPER_HALF)));
                _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {
                    if (evens) even[r][p] = _mm512_fmadd_ps(_mm512_set1_ps(x_even[r][i + j]), w_even, even[r][p]);
                    if (odds) odd[r][p] = _mm512_fmadd_ps(_mm512_set1_ps(x_odd[r][i + j]), w_odd, odd[r][p]);
                }
            }
        }
}

FEW INLINE void block(const Format weights, const int rows, const int panels, const char *x, size_t x_stride,
                         const char *w, size_t panel_bytes, int k, float *c, size_t ldc) {
    float x_even[MOST_ROWS][PANEL] __attribute__((aligned(LINE_BYTES)));
    float x_odd[MOST_ROWS][PANEL] __attribute__((aligned(LINE_BYTES)));
    __m512 sum[MOST_ROWS][MOST_PANELS]; /* Of FP8: of the segment. */
    ROWS_AND_PANELS sum[r][p] = _mm512_setzero_ps();
    for (int step = 0; step < k / STEP_K; step++, x += STEP_BYTES) {
        /* A bfloat16 is the upper half of a float32. */
        for (int r = 0; r < rows; r++) {
            const __m512i pairs = _mm512_loadu_si512(x + (size_t)r * x_stride);
            _mm512_store_si512(x_even[r], _mm512_slli_epi32(pairs, 16));
            _mm512_store_si512(x_odd[r], _mm512_and_si512(pairs, _mm512_set1_epi32(UPPER_HALF)));
        }
        /* Lines of codes from here to the segment's scales. */
        const int place = step % (SEGMENT / STEP_K), rest = (SEGMENT - place * STEP_K) / inputs_per_line(weights);
        __m512i by[MOST_PANELS] = {0};
        if (weights == MXFP4) {
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
                by[p] = lowered(_mm512_load_si512(w + (size_t)p * panel_bytes + (size_t)rest * LINE_BYTES), place);
        }
        __m512 even[MOST_ROWS][MOST_PANELS], odd[MOST_ROWS][MOST_PANELS];
        ROWS_AND_PANELS even[r][p] = odd[r][p] = _mm512_setzero_ps();
        if (rows <= MOST_ROWS_AT_ONCE || weights != BFLOAT16) {
            sum_tile(weights, rows, panels, true, true, x_even, x_odd, w, panel_bytes, by, even, odd);
        } else {
            sum_tile(weights, rows, panels, true, false, x_even, x_odd, w, panel_bytes, by, even, odd);
            sum_tile(weights, rows, panels, false, true, x_even, x_odd, w, panel_bytes, by, even, odd);
        }
        w += STEP_K / inputs_per_line(weights) * LINE_BYTES;
        ROWS_AND_PANELS sum[r][p] = _mm512_add_ps(sum[r][p], _mm512_add_ps(even[r][p], odd[r][p]));
        if (weights == BFLOAT16 || place < SEGMENT / STEP_K - 1) continue;
        if (weights == FP8) {
            ROWS_AND_PANELS {
                float *to = c + (size_t)r * ldc + p * PANEL;
                const __m512 total = step < SEGMENT / STEP_K ? _mm512_setzero_ps() : _mm512_loadu_ps(to);
                _mm512_storeu_ps(to, _mm512_fmadd_ps(sum[r][p], _mm512_load_ps(w + (size_t)p * panel_bytes), total));
                sum[r][p] = _mm512_setzero_ps();
            }
        }
        w += LINE_BYTES;
    }
    if (weights != FP8) {
        ROWS_AND_PANELS _mm512_storeu_ps(c + (size_t)r * ldc + p * PANEL, sum[r][p]);
    }
}

#define CASE(ROWS, PANELS)                                                                                         \
    case ROWS * 8 + PANELS: block(weights, ROWS, PANELS, x, x_stride, w, panel_bytes, k, c, ldc); break;
#define CASES(ROWS) CASE(ROWS, 1) CASE(ROWS, 2)
#define MORE_CASES(ROWS) CASE(ROWS, 3) CASE(ROWS, 4)

FEW INLINE void all_panels(const Format weights, const char *x, size_t x_stride, int m, const char *w,
                           size_t panel_bytes, int panels, int k, float *c, size_t ldc) {
    const bool is_narrow = weights == FP8 && m > MOST_ROWS_AT_ONCE;
    const int most = is_narrow ? PANELS_OF_MORE_ROWS : MOST_PANELS;
    for (int p = 0; p < panels; p += most, w += most * panel_bytes, c += most * PANEL) {
        const int key = m * 8 + (panels - p < most ? panels - p : most);
        switch (key) { CASES(1) CASES(2) MORE_CASES(1) MORE_CASES(2) }
        if (weights != MXFP4)
            switch (key) { CASES(3) CASES(4) }
        if (weights == BFLOAT16)
            switch (key) { MORE_CASES(3) MORE_CASES(4) }
    }
}

/* Not inlined: the arithmetic must not move across the changes of MXCSR. */
#define GEMM(NAME, WEIGHTS)                                                                                        \
    FEW static __attribute__((noinline)) void NAME(const char *x, size_t x_stride, int m, const char *w,           \
                                                   size_t panel_bytes, int panels, int k, float *c, size_t ldc) {  \
        all_panels(WEIGHTS, x, x_stride, m, w, panel_bytes, panels, k, c, ldc);                                    \
    }                                                                                                              \
    void gemm_amx_##NAME##_few(const char *x, size_t x_stride, int m, const char *w, size_t panel_bytes,           \
                               int panels, int k, float *c, size_t ldc) {                                          \
        const unsigned mode = _mm_getcsr();                                                                        \
        _mm_setcsr(AS_TILES_ROUND);                                                                                \
        NAME(x, x_stride, m, w, panel_bytes, panels, k, c, ldc);                                                   \
        _mm_setcsr(mode);                                                                                          \
    }
GEMM(bf16, BFLOAT16)
GEMM(fp8, FP8)
GEMM(mxfp4, MXFP4)
#endif
