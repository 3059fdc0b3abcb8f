/* FP8, e4m3: of a word's four inputs, byte j is the j-th. */
#ifdef VECTOR_BYTES
TARGET INLINE Floats NAME(values_fp8)(Words line, int j, Floats zero) {
    (void)zero;
    /* The exponent of e4m3 in that of a float32 is too small by 120, also for subnormals. */
    const Words code = line >> 8 * j;
    return (Floats)((code & 0x80) << 24 | (code & 0x7f) << 20) * 0x1p120f;
}
#else
static inline uint32_t arrange_fp8(uint32_t word) { return word; }

#ifdef __x86_64__
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
PAIRS INLINE void pairs_fp8(__m512i line, __m512i *pairs) {
    const __m512i code = _mm512_shuffle_epi8(line, HALVES), sign = _mm512_set1_epi8((char)0x80);
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(e4m3_low), code,
                                                 _mm512_load_si512(e4m3_low + LINE_BYTES));
    const __m512i high = _mm512_permutex2var_epi8(_mm512_load_si512(e4m3_high), code,
                                                  _mm512_load_si512(e4m3_high + LINE_BYTES));
    const __m512i signed_high = _mm512_ternarylogic_epi32(high, code, sign, 0xf8); /* high | (code & sign) */
    pairs[0] = _mm512_unpacklo_epi8(low, signed_high);
    pairs[1] = _mm512_unpackhi_epi8(low, signed_high);
}
#endif
#endif
