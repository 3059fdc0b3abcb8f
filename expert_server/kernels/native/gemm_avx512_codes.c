/* Products of bfloat16 rows with FP8 and MXFP4 weights as checkpoints store them: AVX512-BF16.
 *
 * Both kinds of code are exact in bfloat16. A line of codes becomes lines of pairs, as in packed bfloat16:
 *
 *     FP8     64 codes  -> 2 lines: inputs 0,1 and 2,3 of each channel
 *     MXFP4   128 codes -> 4 lines: inputs 0,1 to 6,7
 *
 * The sums that are scaled are chains of dot products in one order, for few rows and for many:
 *
 *     FP8     the first lines of a segment, and its second lines: two sums of 64 inputs with the same scale
 *     MXFP4   the lines of a group of 32 inputs
 */
#include "native.h"

#ifdef __x86_64__
#include <immintrin.h>

#define CODES __attribute__((target("avx512f,avx512bw,avx512vbmi,avx512bf16")))
#define INLINE static inline __attribute__((always_inline))

#define SEGMENT 128 /* Inputs. */
/* Prefetch distance: the hardware prefetcher stops at each 4 KiB page. */
#define AHEAD_BYTES 4096
/* 6 rows by 2 panels: 12 sums, 12 totals, 2 vectors of weights and one of x nearly fill the 32 registers. */
#define ROWS 6
#define PANELS 2
#ifndef SECTION
#define SECTION 3 /* Segments that are decoded at a time: 24 KiB for two panels, which stay in the L1 cache. */
#endif

bool avx512_codes_works(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
}

/* Properties of the formats: lines of a segment without its scales; lines of pairs that a line becomes; sums that are
 * scaled in a segment; lines of pairs in each, and bytes from one to the next in x. */
#define LINES(codes) ((codes) == FP8 ? 32 : 16)
#define PAIRS(codes) ((codes) == FP8 ? 2 : 4)
#define SUMS(codes) ((codes) == FP8 ? 2 : 4)
#define SUM_LINES(codes) ((codes) == FP8 ? 32 : 16)
#define SUM_X_BYTES(codes) ((codes) == FP8 ? 8 : 4)

/* The two bytes of the bfloat16 of e4m3 codes without sign: (code << 4) + (120 << 7), except that the first 8, subnormal
 * in e4m3, are normal in bfloat16. (The dot product takes subnormals for zero: scaling the shifted code is no way.) */
#define X16(byte) byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte, byte
#define LOW 0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0
static const uint8_t e4m3_high[128] __attribute__((aligned(LINE_BYTES))) = {
    0x00, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c,
    X16(0x3d), X16(0x3e), X16(0x3f), X16(0x40), X16(0x41), X16(0x42), X16(0x43)};
static const uint8_t e4m3_low[128] __attribute__((aligned(LINE_BYTES))) = {
    0x00, 0x00, 0x80, 0xc0, 0x00, 0x20, 0x40, 0x60, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0,
    LOW, LOW, LOW, LOW, LOW, LOW, LOW};
#define E2M1                                                                                                       \
    0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, \
    0xc080, 0xc0c0
static const uint16_t e2m1[32] __attribute__((aligned(LINE_BYTES))) = {E2M1, E2M1}; /* vpermw looks at five bits. */

/* Bytes of a line of FP8, so that unpacking the lower and upper halves of each 16 gives inputs 0,1 and 2,3. */
#define ORDER _mm512_set4_epi32(0x0f0e0b0a, 0x07060302, 0x0d0c0908, 0x05040100)

/* A line of codes, pairs 2 * i and 2 * i + 1 of it are decoded at once by some formats only: all into `pairs`. */
CODES INLINE void decode(const Format codes, __m512i line, __m512i *pairs) {
    if (codes == FP8) {
        const __m512i code = _mm512_shuffle_epi8(line, ORDER), sign = _mm512_set1_epi8((char)0x80);
        const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(e4m3_low), code,
                                                     _mm512_load_si512(e4m3_low + LINE_BYTES));
        const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(e4m3_high), code,
                                                      _mm512_load_si512(e4m3_high + LINE_BYTES));
        const __m512i with_sign = _mm512_ternarylogic_epi32(high, code, sign, 0xf8); /* high | (code & sign) */
        pairs[0] = _mm512_unpacklo_epi8(low, with_sign);
        pairs[1] = _mm512_unpackhi_epi8(low, with_sign);
    } else {
        const __m512i table = _mm512_load_si512(e2m1);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) pairs[j] = _mm512_permutexvar_epi16(_mm512_srli_epi32(line, 4 * (unsigned)j), table);
    }
}

/* The scales of a sum of a segment whose line of scales is `at`. */
CODES INLINE __m512 scales(const Format codes, const char *at, int sum) {
    if (codes == FP8) return _mm512_load_ps(at);
    const __m512i exponents = _mm512_srli_epi32(_mm512_load_si512(at), 8 * (unsigned)sum);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_and_si512(exponents, _mm512_set1_epi32(0xff)), 23));
}

CODES INLINE __m512 dot(__m512 sum, const char *x, __m512i pairs) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(*(const int *)x), (__m512bh)pairs);
}

/* Few rows of one panel, strictly forward. `codes` and `rows` are constants after inlining. Two sums at a time: a single
 * row would wait for the latency of its one sum. */
CODES INLINE void few(const Format codes, const int rows, const char *x, size_t x_stride, const char *w, int segments,
                      float *c, size_t ldc) {
    __m512 total[ROWS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) total[r] = _mm512_setzero_ps();
    for (int segment = 0; segment < segments; segment++) {
        const char *scale_line = w + LINES(codes) * LINE_BYTES;
        for (int first = 0; first < SUMS(codes); first += 2) {
            __m512 sum[ROWS][2];
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
            if (codes == FP8) {
                for (int line = 0; line < 32; line++, w += LINE_BYTES) {
                    __m512i pairs[2];
                    _mm_prefetch(w + AHEAD_BYTES, _MM_HINT_T0);
                    decode(FP8, _mm512_load_si512(w), pairs);
#pragma GCC unroll 6
                    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                        for (int i = 0; i < 2; i++)
                            sum[r][i] = dot(sum[r][i], x + (size_t)r * x_stride + line * 8 + i * 4, pairs[i]);
                }
            } else {
                for (int line = 0; line < 4; line++, w += LINE_BYTES)
#pragma GCC unroll 2
                    for (int i = 0; i < 2; i++) {
                        __m512i pairs[4];
                        _mm_prefetch(w + i * 4 * LINE_BYTES + AHEAD_BYTES, _MM_HINT_T0);
                        decode(MXFP4, _mm512_load_si512(w + i * 4 * LINE_BYTES), pairs);
#pragma GCC unroll 4
                        for (int j = 0; j < 4; j++)
#pragma GCC unroll 6
                            for (int r = 0; r < rows; r++)
                                sum[r][i] = dot(sum[r][i],
                                                x + (size_t)r * x_stride + (first + i) * 64 + line * 16 + j * 4,
                                                pairs[j]);
                    }
                w += 4 * LINE_BYTES;
            }
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                const __m512 scale = scales(codes, scale_line, first + i);
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++) total[r] = _mm512_fmadd_ps(sum[r][i], scale, total[r]);
            }
        }
        _mm_prefetch(w + AHEAD_BYTES, _MM_HINT_T0);
        w += LINE_BYTES;
        x += SEGMENT * 2;
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) _mm512_storeu_ps(c + (size_t)r * ldc, total[r]);
}

/* A section of a panel, decoded: the lines of each sum, and their scales. */
typedef struct {
    char lines[SECTION * SEGMENT / 2 * LINE_BYTES];
    float scales[SECTION * 4][PANEL];
} __attribute__((aligned(LINE_BYTES))) Section;

CODES INLINE void decode_section(const Format codes, const char *w, int segments, Section *out) {
    char *to = out->lines;
    for (int segment = 0; segment < segments; segment++) {
        for (int line = 0; line < LINES(codes); line++, w += LINE_BYTES) {
            __m512i pairs[4];
            _mm_prefetch(w + AHEAD_BYTES, _MM_HINT_T0);
            decode(codes, _mm512_load_si512(w), pairs);
            for (int j = 0; j < PAIRS(codes); j++)
                _mm512_store_si512(codes == FP8 ? to + (j * 32 + line) * LINE_BYTES : to + (line * 4 + j) * LINE_BYTES,
                                   pairs[j]);
        }
        to += SEGMENT / 2 * LINE_BYTES;
        for (int sum = 0; sum < SUMS(codes); sum++)
            _mm512_store_ps(out->scales[segment * SUMS(codes) + sum], scales(codes, w, sum));
        w += LINE_BYTES;
    }
}

/* Some rows of a section of one or two panels. */
CODES INLINE void many(const Format codes, const int rows, const int panels, const char *x, size_t x_stride,
                       const Section *section, int segments, float *c, size_t ldc, bool add) {
    __m512 total[ROWS][PANELS], sum[ROWS][PANELS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++)
            total[r][p] = add ? _mm512_loadu_ps(c + (size_t)r * ldc + p * PANEL) : _mm512_setzero_ps();
    const char *line = section->lines;
    for (int number = 0; number < segments * SUMS(codes); number++) {
        const char *xs = codes == FP8 ? x + number / 2 * 256 + number % 2 * 4 : x + number * 64;
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
            for (int p = 0; p < panels; p++) sum[r][p] = _mm512_setzero_ps();
        for (int i = 0; i < SUM_LINES(codes); i++, line += LINE_BYTES, xs += SUM_X_BYTES(codes)) {
            __m512i pairs[PANELS];
#pragma GCC unroll 2
            for (int p = 0; p < panels; p++) pairs[p] = _mm512_load_si512(line + p * sizeof(Section));
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
                for (int p = 0; p < panels; p++) sum[r][p] = dot(sum[r][p], xs + (size_t)r * x_stride, pairs[p]);
        }
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++) {
            const __m512 scale = _mm512_load_ps(section[p].scales[number]);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) total[r][p] = _mm512_fmadd_ps(sum[r][p], scale, total[r][p]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int p = 0; p < panels; p++) _mm512_storeu_ps(c + (size_t)r * ldc + p * PANEL, total[r][p]);
}

#define FEW_CASE(ROWS)                                                                                             \
    case ROWS: few(codes, ROWS, x, x_stride, w + (size_t)p * panel_bytes, segments, c + p * PANEL, ldc); break;
#define CASE(ROWS, PANELS)                                                                                         \
    case ROWS * 4 + PANELS: many(codes, ROWS, PANELS, xs, x_stride, section, width, cs, ldc, at > 0); break;
#define CASES(ROWS) CASE(ROWS, 1) CASE(ROWS, 2)

CODES INLINE void gemm(const Format codes, const char *x, size_t x_stride, int m, const char *w, size_t panel_bytes,
                       int panels, int k, float *c, size_t ldc) {
    const int segments = k / SEGMENT;
    if (m <= ROWS) {
        for (int p = 0; p < panels; p++) switch (m) {
                FEW_CASE(1) FEW_CASE(2) FEW_CASE(3) FEW_CASE(4) FEW_CASE(5) FEW_CASE(6)
            }
        return;
    }
    Section section[PANELS];
    for (int p = 0; p < panels; p += PANELS) {
        const int at_once = panels - p < PANELS ? panels - p : PANELS;
        for (int at = 0; at < segments; at += SECTION) {
            const int width = segments - at < SECTION ? segments - at : SECTION;
            const size_t from = (size_t)at * (LINES(codes) + 1) * LINE_BYTES;
            for (int i = 0; i < at_once; i++)
                decode_section(codes, w + (size_t)(p + i) * panel_bytes + from, width, &section[i]);
            for (int row = 0; row < m; row += ROWS) {
                const int rows = m - row < ROWS ? m - row : ROWS;
                const char *xs = x + (size_t)row * x_stride + (size_t)at * SEGMENT * 2;
                float *cs = c + (size_t)row * ldc + p * PANEL;
                switch (rows * 4 + at_once) { CASES(1) CASES(2) CASES(3) CASES(4) CASES(5) CASES(6) }
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
