/* FP8 and MXFP4 codes to bfloat16, in registers. Included by products that read them.
 *
 *     FP8     panel p | segment of 128 k | segment | ...     a segment: k = 0..3: 16 quads | ... | 16 scales
 *     MXFP4   panel p | segment of 128 k | segment | ...     a segment: k = 0..7: 16 octets | ... | 16 x 4 exponents
 *
 * An octet has k = 0, 2, 4, 6 in its lower 16 bits, from the lowest nibble up, and k = 1, 3, 5, 7 in the higher ones.
 * Scales are float32; an exponent, a byte for each 32 k, stands for 2^(exponent - 127). Both kinds of code are exact in
 * bfloat16.
 */
#pragma once
#include <immintrin.h>

#include "native.h"

#define CODES __attribute__((target("avx512f,avx512bw,avx512vbmi")))
#define INLINE static inline __attribute__((always_inline))
#define SEGMENT 128 /* Inputs, of both formats. */
#define GROUP 32    /* Inputs of a scale of MXFP4. */

static inline bool can_decode(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vbmi");
}

/* Lines of pairs that a line of codes becomes. */
#define PAIRS(weights) (inputs_per_line(weights) / 2)
/* Bytes of a segment's codes; its scales follow. */
#define CODES_BYTES(weights) ((size_t)(SEGMENT / inputs_per_line(weights)) * LINE_BYTES)
#define SEGMENT_BYTES(weights) (CODES_BYTES(weights) + LINE_BYTES)

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

/* Of four channels, first the bytes with k = 0, 1, then those with k = 2, 3: unpacking takes a lower or upper half. */
#define HALVES _mm512_set4_epi32(0x0f0e0b0a, 0x07060302, 0x0d0c0908, 0x05040100)

/* A line of e4m3 codes to two lines of pairs. */
CODES INLINE void decode_fp8(__m512i line, __m512i *pairs) {
    const __m512i code = _mm512_shuffle_epi8(line, HALVES), sign = _mm512_set1_epi8((char)0x80);
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(e4m3_low), code,
                                                 _mm512_load_si512(e4m3_low + LINE_BYTES));
    const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(e4m3_high), code,
                                                  _mm512_load_si512(e4m3_high + LINE_BYTES));
    const __m512i signed_high = _mm512_ternarylogic_epi32(high, code, sign, 0xf8); /* high | (code & sign) */
    pairs[0] = _mm512_unpacklo_epi8(low, signed_high);
    pairs[1] = _mm512_unpackhi_epi8(low, signed_high);
}

/* Values of e2m1 in bfloat16. The lookup takes five bits of an index of which four are a code. */
#define E2M1 0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0
#define MINUS_E2M1 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0
static const uint16_t e2m1[32] __attribute__((aligned(LINE_BYTES))) = {E2M1, MINUS_E2M1, E2M1, MINUS_E2M1};
/* The same times 2^125, and -0 for 0: see `scale_mxfp4`. */
#define LARGE_E2M1 0x8000, 0x7d80, 0x7e00, 0x7e40, 0x7e80, 0x7ec0, 0x7f00, 0x7f40
#define MINUS_LARGE_E2M1 0x8000, 0xfd80, 0xfe00, 0xfe40, 0xfe80, 0xfec0, 0xff00, 0xff40
static const uint16_t large_e2m1[32] __attribute__((aligned(LINE_BYTES))) = {LARGE_E2M1, MINUS_LARGE_E2M1, LARGE_E2M1,
                                                                             MINUS_LARGE_E2M1};

/* A line of e2m1 codes to four lines of pairs, by one of the tables. */
CODES INLINE void decode_mxfp4(__m512i line, const uint16_t *table, __m512i *pairs) {
#pragma GCC unroll 4
    for (unsigned j = 0; j < 4; j++)
        pairs[j] = _mm512_permutexvar_epi16(_mm512_srli_epi32(line, 4 * j), _mm512_load_si512(table));
}

/* The exponents of the g-th group of the segment whose line of exponents is `line`. */
CODES INLINE __m512i exponents(__m512i line, int g) {
    return _mm512_and_si512(_mm512_srli_epi32(line, 8 * (unsigned)g), _mm512_set1_epi32(0xff));
}

/* What to subtract from the exponents of large_e2m1, in both halves of a word. 2^-127 counts as 2^-126. */
CODES INLINE __m512i lowered(__m512i line, int g) {
    const __m512i exponent = _mm512_max_epi32(exponents(line, g), _mm512_set1_epi32(1));
    const __m512i by = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(LARGEST_EXPONENT), exponent), 7);
    return _mm512_or_si512(by, _mm512_slli_epi32(by, 16));
}

/* Pairs from large_e2m1 times their scales: exact. A subtraction that saturates keeps -0. */
CODES INLINE __m512i scale_mxfp4(__m512i pairs, __m512i by) { return _mm512_subs_epi16(pairs, by); }
