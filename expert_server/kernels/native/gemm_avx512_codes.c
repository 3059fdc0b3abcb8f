/* Products of bfloat16 rows with FP8 and MXFP4 weights as checkpoints store them, with the dot product of bfloat16.
 *
 *     FP8     panel p | segment of 128 k | segment | ...     a segment: k = 0..3: 16 quads | ... | 16 scales
 *     MXFP4   panel p | segment of 128 k | segment | ...     a segment: k = 0..7: 16 octets | ... | 16 x 4 exponents
 *
 * An octet has k = 0, 2, 4, 6 in its lower 16 bits, from the lowest nibble up, and k = 1, 3, 5, 7 in the higher ones.
 * Scales are float32; an exponent, a byte for each 32 k, stands for 2^(exponent - 127).
 *
 * Both kinds of code are exact in bfloat16. A line of codes becomes two (FP8) or four lines of pairs, as in packed
 * bfloat16, in registers, again for each 12 rows: beside their dot products that is nearly free. A sum of 64 k (FP8) or
 * 32 k (MXFP4) begins at zero; then it is multiplied by its scales and added to the total.
 */
#include "native.h"

#ifdef __x86_64__
#include <immintrin.h>

#define CODES __attribute__((target("avx512f,avx512bw,avx512vbmi,avx512bf16")))
#define INLINE static inline __attribute__((always_inline))

#define SEGMENT 128 /* Inputs. */
/* Prefetch distance: the hardware prefetcher stops at each 4 KiB page. */
#define AHEAD_BYTES 4096
/* 12 rows of one panel: 12 sums and 12 totals; the tables need most of the other registers. */
#define ROWS 12
/* Up to this many rows would wait for the latency of one sum each, and work on two. */
#define FEW_ROWS 6
/* In segments. 128 rows of x: 384 KiB. */
#define OUTER 12
/* 12 rows of x: 12 KiB, and codes: 8 KiB. */
#define INNER 4


bool avx512_codes_works(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
}

/* Sums of a segment; lines of codes of a sum; lines of pairs that a line of codes becomes. */
#define SUMS(codes) ((codes) == FP8 ? 2 : 4)
#define LINES(codes) ((codes) == FP8 ? 16 : 4)
#define PAIRS(codes) ((codes) == FP8 ? 2 : 4)
#define SEGMENT_BYTES(codes) ((size_t)(SUMS(codes) * LINES(codes) + 1) * LINE_BYTES)

/* The bytes of e4m3 codes in bfloat16, without sign: (code << 4) + (120 << 7), but the first eight codes are subnormal.
 * No shifts and products instead of tables: the dot product takes subnormal values of bfloat16 for zero. */
#define X4(byte) byte, byte, byte, byte
#define X16(byte) X4(byte), X4(byte), X4(byte), X4(byte)
#define LOWS 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0
static const uint8_t e4m3_high[128] __attribute__((aligned(LINE_BYTES))) = {
    0x00, 0x3b, 0x3b, 0x3b, X4(0x3c), X4(0x3c), X4(0x3c),
    X16(0x3d), X16(0x3e), X16(0x3f), X16(0x40), X16(0x41), X16(0x42), X16(0x43)};
static const uint8_t e4m3_low[128] __attribute__((aligned(LINE_BYTES))) = {
    0x00, 0x00, 0x80, 0xc0, 0x00, 0x20, 0x40, 0x60, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0,
    LOWS, LOWS, LOWS, LOWS, LOWS, LOWS, LOWS};
/* The lookup takes five bits of an index of which four are a code. */
#define E2M1 0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0
#define MINUS_E2M1 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0
static const uint16_t e2m1[32] __attribute__((aligned(LINE_BYTES))) = {E2M1, MINUS_E2M1, E2M1, MINUS_E2M1};

/* Of four channels, first the bytes with k = 0, 1, then those with k = 2, 3: unpacking takes a lower or upper half. */
#define HALVES _mm512_set4_epi32(0x0f0e0b0a, 0x07060302, 0x0d0c0908, 0x05040100)

/* A line of codes to lines of pairs. */
CODES INLINE void decode(const Format codes, __m512i line, __m512i *pairs) {
    if (codes == FP8) {
        const __m512i code = _mm512_shuffle_epi8(line, HALVES), sign = _mm512_set1_epi8((char)0x80);
        const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(e4m3_low), code,
                                                     _mm512_load_si512(e4m3_low + LINE_BYTES));
        const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(e4m3_high), code,
                                                      _mm512_load_si512(e4m3_high + LINE_BYTES));
        const __m512i signed_high = _mm512_ternarylogic_epi32(high, code, sign, 0xf8); /* high | (code & sign) */
        pairs[0] = _mm512_unpacklo_epi8(low, signed_high);
        pairs[1] = _mm512_unpackhi_epi8(low, signed_high);
    } else {
        const __m512i table = _mm512_load_si512(e2m1);
#pragma GCC unroll 4
        for (unsigned j = 0; j < 4; j++) pairs[j] = _mm512_permutexvar_epi16(_mm512_srli_epi32(line, 4 * j), table);
    }
}

/* The scales of a sum; `at` is the last line of its segment. */
CODES INLINE __m512 scales(const Format codes, const char *at, int number) {
    if (codes == FP8) return _mm512_load_ps(at);
    const __m512i exponents = _mm512_srli_epi32(_mm512_load_si512(at), 8 * (unsigned)number);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_and_si512(exponents, _mm512_set1_epi32(0xff)), 23));
}

#define DOT(sum, at, pairs) _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(*(const int *)(at)), (__m512bh)(pairs))

/* Some rows by segments of one panel. `codes` and `rows` are constants after inlining, so that the sums stay in
 * registers. */
CODES INLINE void block(const Format codes, const int rows, const char *x, size_t x_stride, const char *w, int segments,
                        float *c, size_t ldc, bool add) {
    const int at_once = rows <= FEW_ROWS ? 2 : 1;
    __m512 total[ROWS], sum[ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) total[r] = add ? _mm512_loadu_ps(c + r * ldc) : _mm512_setzero_ps();
    for (int segment = 0; segment < segments; segment++, w += LINE_BYTES) {
        const char *scale_line = w + SUMS(codes) * LINES(codes) * LINE_BYTES;
        _mm_prefetch(scale_line + AHEAD_BYTES, _MM_HINT_T0);
        for (int number = 0; number < SUMS(codes); number += at_once) {
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
            for (int line = 0; line < LINES(codes); line++)
#pragma GCC unroll 2
                for (int i = 0; i < at_once; i++) {
                    __m512i pairs[4];
                    const int at = i * LINES(codes) + line;
                    _mm_prefetch(w + (line * at_once + i) * LINE_BYTES + AHEAD_BYTES, _MM_HINT_T0);
                    decode(codes, _mm512_load_si512(w + at * LINE_BYTES), pairs);
                    for (int j = 0; j < PAIRS(codes); j++)
#pragma GCC unroll 12
                        for (int r = 0; r < rows; r++)
                            sum[r][i] = DOT(sum[r][i], x + r * x_stride + (at * PAIRS(codes) + j) * 4, pairs[j]);
                }
#pragma GCC unroll 2
            for (int i = 0; i < at_once; i++) {
                const __m512 scale = scales(codes, scale_line, number + i);
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) total[r] = _mm512_fmadd_ps(sum[r][i], scale, total[r]);
            }
            w += at_once * LINES(codes) * LINE_BYTES;
            x += at_once * LINES(codes) * PAIRS(codes) * 4;
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) _mm512_storeu_ps(c + r * ldc, total[r]);
}

#define CASE(ROWS)                                                                                                 \
    case ROWS: block(codes, ROWS, xs, x_stride, ws, segments, cs, ldc, at > 0); break;

/* Many rows: an outer section of k whose rows of x stay in the L2 cache; within it a panel, of which an inner section
 * stays in the L1 cache while all rows use it. Few rows: strictly forward. */
CODES INLINE void gemm(const Format codes, const char *x, size_t x_stride, int m, const char *w, size_t panel_bytes,
                       int panels, int k, float *c, size_t ldc) {
    const int all = k / SEGMENT, outer = m > ROWS ? OUTER : all, inner = m > ROWS ? INNER : all;
    for (int from = 0; from < all; from += outer)
        for (int p = 0; p < panels; p++) {
            const int to = all - from < outer ? all : from + outer;
            for (int at = from; at < to; at += inner)
                for (int row = 0, rows, blocks = (m + ROWS - 1) / ROWS; row < m; row += rows, blocks--) {
                    rows = (m - row + blocks - 1) / blocks;
                    const int segments = to - at < inner ? to - at : inner;
                    const char *xs = x + (size_t)row * x_stride + (size_t)at * SEGMENT * 2;
                    const char *ws = w + (size_t)p * panel_bytes + (size_t)at * SEGMENT_BYTES(codes);
                    float *cs = c + (size_t)row * ldc + p * PANEL;
                    switch (rows) {
                        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11)
                        CASE(12)
                    }
                }
        }
}

CODES void gemm_avx512_fp8(const char *x, size_t x_stride, int m, const char *w, size_t panel_bytes, int panels, int k,
                           float *c, size_t ldc) {
    gemm(FP8, x, x_stride, m, w, panel_bytes, panels, k, c, ldc);
}

CODES void gemm_avx512_mxfp4(const char *x, size_t x_stride, int m, const char *w, size_t panel_bytes, int panels,
                             int k, float *c, size_t ldc) {
    gemm(MXFP4, x, x_stride, m, w, panel_bytes, panels, k, c, ldc);
}
#endif
