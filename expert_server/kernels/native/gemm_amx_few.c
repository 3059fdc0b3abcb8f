/* Products of 1 to 4 bfloat16 rows (with exponents: 1 or 2) with FMA, bit for bit equal to the tiles' (gemm_amx.c).
 *
 * FMA keeps up with memory. Tiles do not if another process uses the core's other hardware thread: then a tile load
 * takes three times as long and does not overlap with products.
 *
 * For each tile of 32 inputs, TDPBF16PS sums the even and the odd ones separately, with FMA and from zero. It adds both
 * sums, and the result to c. It rounds to nearest and treats subnormals as zero (Intel 64 and IA-32 Architectures
 * Software Developer's Manual, volume 2, TDPBF16PS).
 *
 * Narrow floats are decoded in registers. Each part has its scales as the tiles' lines and sums have.
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
_Static_assert(MOST_ROWS == 4 && AMX_FEW_ROWS_EXPONENTS == 2, "all_panels has a case for each");

/* `weights`, `rows` and `panels` are constants after inlining, so that the sums stay in registers. */
#define ROWS_AND_PANELS                                                                                            \
    _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) _Pragma("GCC unroll 4") for (int p = 0; p < panels; p++)

#define HAS_EXPONENTS(weights) (layouts[weights].scales == EXPONENTS)

/* A line of weights to lines of pairs; `by`: with exponents. */
FEW INLINE void decode(const Format weights, __m512i line, __m512i by, __m512i *pairs) {
    if (HAS_EXPONENTS(weights))
        decode_scaled(weights, line, by, pairs);
    else
        decode_pairs(weights, line, pairs);
}

/* Sums the even inputs, the odd ones, or both (constants, too) of one tile of each panel. */
FEW INLINE void sum_tile(const Format weights, const int rows, const int panels, const bool evens, const bool odds,
                            float (*x_even)[PANEL], float (*x_odd)[PANEL], const char *w, size_t panel_bytes,
                            const __m512i *by, __m512 (*even)[MOST_PANELS], __m512 (*odd)[MOST_PANELS]) {
    for (int i = 0; i < STEP_K / 2; i += PAIR_LINES(weights), w += LINE_BYTES)
        _Pragma("GCC unroll 4") for (int p = 0; p < panels; p++) {
            __m512i pairs[4];
            decode(weights, _mm512_load_si512(w + (size_t)p * panel_bytes), by[p], pairs);
            _Pragma("GCC unroll 4") for (int j = 0; j < PAIR_LINES(weights); j++) {
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
    __m512 sum[MOST_ROWS][MOST_PANELS]; /* Without exponents: of the segment. */
    ROWS_AND_PANELS sum[r][p] = _mm512_setzero_ps();
    for (int step = 0; step < k / STEP_K; step++, x += STEP_BYTES) {
        /* A bfloat16 is the upper half of a float32. */
        for (int r = 0; r < rows; r++) {
            const __m512i pairs = _mm512_loadu_si512(x + (size_t)r * x_stride);
            _mm512_store_si512(x_even[r], _mm512_slli_epi32(pairs, 16));
            _mm512_store_si512(x_odd[r], _mm512_and_si512(pairs, _mm512_set1_epi32(UPPER_HALF)));
        }
        /* Lines of codes from here to the segment's scales. */
        const int steps = has_scales(weights) ? segment_inputs(weights) / STEP_K : 1, place = step % steps;
        const int rest = (steps - place) * STEP_K / inputs_per_line(weights);
        __m512i by[MOST_PANELS] = {0};
        if (HAS_EXPONENTS(weights)) {
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++)
                by[p] = lowered(_mm512_load_si512(w + (size_t)p * panel_bytes + (size_t)rest * LINE_BYTES),
                                place * STEP_K / group_inputs(weights));
        }
        __m512 even[MOST_ROWS][MOST_PANELS], odd[MOST_ROWS][MOST_PANELS];
        ROWS_AND_PANELS even[r][p] = odd[r][p] = _mm512_setzero_ps();
        if (rows <= MOST_ROWS_AT_ONCE || has_scales(weights)) {
            sum_tile(weights, rows, panels, true, true, x_even, x_odd, w, panel_bytes, by, even, odd);
        } else {
            sum_tile(weights, rows, panels, true, false, x_even, x_odd, w, panel_bytes, by, even, odd);
            sum_tile(weights, rows, panels, false, true, x_even, x_odd, w, panel_bytes, by, even, odd);
        }
        w += STEP_K / inputs_per_line(weights) * LINE_BYTES;
        ROWS_AND_PANELS sum[r][p] = _mm512_add_ps(sum[r][p], _mm512_add_ps(even[r][p], odd[r][p]));
        if (!has_scales(weights) || place < steps - 1) continue;
        if (!HAS_EXPONENTS(weights)) {
            ROWS_AND_PANELS {
                float *to = c + (size_t)r * ldc + p * PANEL;
                const __m512 total = step < steps ? _mm512_setzero_ps() : _mm512_loadu_ps(to);
                _mm512_storeu_ps(to, _mm512_fmadd_ps(sum[r][p], _mm512_load_ps(w + (size_t)p * panel_bytes), total));
                sum[r][p] = _mm512_setzero_ps();
            }
        }
        w += LINE_BYTES;
    }
    if (!has_scales(weights) || HAS_EXPONENTS(weights)) {
        ROWS_AND_PANELS _mm512_storeu_ps(c + (size_t)r * ldc + p * PANEL, sum[r][p]);
    }
}

#define CASE(ROWS, PANELS)                                                                                         \
    case ROWS * 8 + PANELS: block(weights, ROWS, PANELS, x, x_stride, w, panel_bytes, k, c, ldc); break;
#define CASES(ROWS) CASE(ROWS, 1) CASE(ROWS, 2)
#define MORE_CASES(ROWS) CASE(ROWS, 3) CASE(ROWS, 4)

FEW INLINE void all_panels(const Format weights, GEMM_PARAMETERS) {
    const bool is_narrow = has_scales(weights) && m > MOST_ROWS_AT_ONCE;
    const int most = is_narrow ? PANELS_OF_MORE_ROWS : MOST_PANELS;
    for (int p = 0; p < panels; p += most, w += most * panel_bytes, c += most * PANEL) {
        const int key = m * 8 + (panels - p < most ? panels - p : most);
        switch (key) { CASES(1) CASES(2) MORE_CASES(1) MORE_CASES(2) }
        if (!HAS_EXPONENTS(weights))
            switch (key) { CASES(3) CASES(4) }
        if (!has_scales(weights))
            switch (key) { MORE_CASES(3) MORE_CASES(4) }
    }
}

/* Not inlined: the arithmetic must not move across the changes of MXCSR. */
#define GEMM(FUNCTION, WEIGHTS)                                                                                    \
    FEW static __attribute__((noinline)) void few_##WEIGHTS(GEMM_PARAMETERS) { all_panels(WEIGHTS, GEMM_ARGUMENTS); } \
    void FUNCTION(GEMM_PARAMETERS) {                                                                               \
        const unsigned mode = _mm_getcsr();                                                                        \
        _mm_setcsr(AS_TILES_ROUND);                                                                                \
        few_##WEIGHTS(GEMM_ARGUMENTS);                                                                             \
        _mm_setcsr(mode);                                                                                          \
    }
#define GEMM_OF_CODES(FORMAT, ...) GEMM(gemm_amx_few_##FORMAT, FORMAT)
GEMM(gemm_amx_bf16_few, BFLOAT16)
EACH_NARROW_FLOAT(GEMM_OF_CODES)
#endif
