/* Products of bfloat16 rows with narrow floats as checkpoints store them, with the dot product of bfloat16.
 *
 * A line of codes becomes lines of pairs, as in packed bfloat16, in registers (codes.h), again for each 12 rows: beside
 * their dot products that is nearly free. A sum of 64 k or of a shorter group begins at zero; then it is multiplied by its
 * scales and added to the total.
 */
#include "native.h"

#ifdef __x86_64__
#include "codes.h"

#define DOTS __attribute__((target("avx512f,avx512bw,avx512vbmi,avx512bf16")))
/* Prefetch distance: the hardware prefetcher stops at each 4 KiB page. */
#define AHEAD_BYTES 4096
/* 12 rows of one panel: 12 sums and 12 totals; the tables need most of the other registers. */
#define ROWS 12
/* Rows would wait for the latency of one sum each: up to so many work on two, and on four where a segment has them. */
#define ROWS_OF_TWO 6
#define ROWS_OF_FOUR 3
/* In segments. 128 rows of x: 384 KiB. */
#define OUTER 12
/* 12 rows of x: 12 KiB, and codes: 8 KiB. */
#define INNER 4

bool avx512_codes_works(void) { return can_decode_pairs() && __builtin_cpu_supports("avx512bf16"); }

/* Lines of codes of a sum; sums of a segment. */
#define MOST_INPUTS 64
#define LINES(codes) ((group_inputs(codes) < MOST_INPUTS ? group_inputs(codes) : MOST_INPUTS) / inputs_per_line(codes))
#define SUMS(codes) (segment_inputs(codes) / inputs_per_line(codes) / LINES(codes))

/* The scales of a sum; `at` is the last line of its segment. */
DOTS INLINE __m512 scales(const Format codes, const char *at, int number) {
    if (layouts[codes].scales != EXPONENTS) return _mm512_load_ps(at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(exponents(_mm512_load_si512(at), number), 23));
}

#define DOT(sum, at, pairs) _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(*(const int *)(at)), (__m512bh)(pairs))

/* Some rows by segments of one panel. `codes` and `rows` are constants after inlining, so that the sums stay in
 * registers. */
DOTS INLINE void block(const Format codes, const int rows, const char *x, size_t x_stride, const char *w, int segments,
                        float *c, size_t ldc, bool add) {
    const int at_once = rows > ROWS_OF_TWO ? 1 : rows > ROWS_OF_FOUR || SUMS(codes) < 4 ? 2 : 4;
    __m512 total[ROWS], sum[ROWS][4];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) total[r] = add ? _mm512_loadu_ps(c + r * ldc) : _mm512_setzero_ps();
    for (int segment = 0; segment < segments; segment++, w += LINE_BYTES) {
        const char *scale_line = w + codes_bytes(codes);
        _mm_prefetch(scale_line + AHEAD_BYTES, _MM_HINT_T0);
        for (int number = 0; number < SUMS(codes); number += at_once) {
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int i = 0; i < at_once; i++) sum[r][i] = _mm512_setzero_ps();
            for (int line = 0; line < LINES(codes); line++)
#pragma GCC unroll 4
                for (int i = 0; i < at_once; i++) {
                    __m512i pairs[4];
                    const int at = i * LINES(codes) + line;
                    _mm_prefetch(w + (line * at_once + i) * LINE_BYTES + AHEAD_BYTES, _MM_HINT_T0);
                    decode_pairs(codes, _mm512_load_si512(w + at * LINE_BYTES), pairs);
                    for (int j = 0; j < PAIR_LINES(codes); j++)
#pragma GCC unroll 12
                        for (int r = 0; r < rows; r++)
                            sum[r][i] = DOT(sum[r][i], x + r * x_stride + (at * PAIR_LINES(codes) + j) * 4, pairs[j]);
                }
#pragma GCC unroll 4
            for (int i = 0; i < at_once; i++) {
                const __m512 scale = scales(codes, scale_line, number + i);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) total[r] = _mm512_fmadd_ps(sum[r][i], scale, total[r]);
            }
            w += at_once * LINES(codes) * LINE_BYTES;
            x += at_once * LINES(codes) * PAIR_LINES(codes) * 4;
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) _mm512_storeu_ps(c + r * ldc, total[r]);
}

#define CASE(ROWS)                                                                                                 \
    case ROWS: block(codes, ROWS, xs, x_stride, ws, segments, cs, ldc, at > 0); break;

/* Many rows: an outer section of k whose rows of x stay in the L2 cache; within it a panel, of which an inner section
 * stays in the L1 cache while all rows use it. Few rows: strictly forward. */
DOTS INLINE void gemm(const Format codes, GEMM_PARAMETERS) {
    const int segment = segment_inputs(codes), all = k / segment, outer = m > ROWS ? OUTER : all, inner = m > ROWS ? INNER : all;
    for (int from = 0; from < all; from += outer)
        for (int p = 0; p < panels; p++) {
            const int to = all - from < outer ? all : from + outer;
            for (int at = from; at < to; at += inner)
                for (int row = 0, rows, blocks = (m + ROWS - 1) / ROWS; row < m; row += rows, blocks--) {
                    rows = (m - row + blocks - 1) / blocks;
                    const int segments = to - at < inner ? to - at : inner;
                    const char *xs = x + (size_t)row * x_stride + (size_t)at * segment * 2;
                    const char *ws = w + (size_t)p * panel_bytes + (size_t)at * panel_bytes_of(codes, segment);
                    float *cs = c + (size_t)row * ldc + p * PANEL;
                    switch (rows) {
                        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11)
                        CASE(12)
                    }
                }
        }
}

#define GEMM(FORMAT, ...) DOTS void gemm_avx512_##FORMAT(GEMM_PARAMETERS) { gemm(FORMAT, GEMM_ARGUMENTS); }
EACH_NARROW_FLOAT(GEMM)
#endif
