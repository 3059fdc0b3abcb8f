/* MXFP4, e2m1: a word has k = 0, 2, 4, 6 in its lower 16 bits, from the lowest four up, and k = 1, 3, 5, 7 in the upper. */
#ifdef VECTOR_BYTES
TARGET INLINE Floats NAME(values_mxfp4)(Words line, int j, Floats zero) {
    (void)zero;
    const Words codes = line >> (j % 2 * 16 + j / 2 * 4);
#if VECTOR_BYTES == 32
    const Floats magnitudes = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    return (Floats)((Words)__builtin_shuffle(magnitudes, codes & 7) | (codes & 8) << 28);
#else
    /* The exponent of e2m1 in that of a float32 is too small by 126. */
    return (Floats)((codes & 8) << 28 | (codes & 7) << 22) * 0x1p126f;
#endif
}
#else
/* The lower halves of a word's bytes, close together. */
static inline uint32_t squeeze(uint32_t halves) {
    halves = (halves | halves >> 4) & 0x00ff00ff;
    return (halves | halves >> 8) & 0x0000ffff;
}

static inline uint32_t arrange_mxfp4(uint32_t word) {
    return squeeze(word & 0x0f0f0f0f) | squeeze(word >> 4 & 0x0f0f0f0f) << 16;
}

#ifdef __x86_64__
/* Values of e2m1 in bfloat16. The lookup takes five bits of an index of which four are a code. */
#define E2M1 0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0
#define MINUS_E2M1 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0
static const uint16_t e2m1[32] __attribute__((aligned(LINE_BYTES))) = {E2M1, MINUS_E2M1, E2M1, MINUS_E2M1};
/* The same times 2^125, and -0 for 0: see `scaled_mxfp4`. */
#define LARGE_E2M1 0x8000, 0x7d80, 0x7e00, 0x7e40, 0x7e80, 0x7ec0, 0x7f00, 0x7f40
#define MINUS_LARGE_E2M1 0x8000, 0xfd80, 0xfe00, 0xfe40, 0xfe80, 0xfec0, 0xff00, 0xff40
static const uint16_t large_e2m1[32] __attribute__((aligned(LINE_BYTES))) = {LARGE_E2M1, MINUS_LARGE_E2M1, LARGE_E2M1,
                                                                             MINUS_LARGE_E2M1};

PAIRS INLINE __m512i pairs_of_mxfp4(__m512i line, unsigned j, const uint16_t *table) {
    return _mm512_permutexvar_epi16(_mm512_srli_epi32(line, 4 * j), _mm512_load_si512(table));
}

/* A line of e2m1 codes to four lines of pairs. */
PAIRS INLINE void pairs_mxfp4(__m512i line, __m512i *pairs) {
#pragma GCC unroll 4
    for (unsigned j = 0; j < 4; j++) pairs[j] = pairs_of_mxfp4(line, j, e2m1);
}

/* The same times a power of two, `by` of `lowered`: exact. A subtraction that saturates keeps -0. */
PAIRS INLINE void scaled_mxfp4(__m512i line, __m512i by, __m512i *pairs) {
#pragma GCC unroll 4
    for (unsigned j = 0; j < 4; j++) pairs[j] = _mm512_subs_epi16(pairs_of_mxfp4(line, j, large_e2m1), by);
}
#endif
#endif
