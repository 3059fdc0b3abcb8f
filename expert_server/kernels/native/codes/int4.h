/* int4, unsigned: of a word's eight inputs, byte j has the j-th in its lower half and the (j + 4)-th in its upper one. */
#ifdef VECTOR_BYTES
TARGET INLINE Floats NAME(values_int4)(Words line, int j, Floats zero) {
    return NAME(integers)(line >> (j % 4 * 8 + j / 4 * 4) & 15) - zero;
}
#else
/* The lowest four halves of bytes become the lower halves of all bytes. */
static inline uint32_t spread(uint32_t halves) {
    halves = (halves | halves << 8) & 0x00ff00ff;
    return (halves | halves << 4) & 0x0f0f0f0f;
}

static inline uint32_t arrange_int4(uint32_t word) { return spread(word & 0xffff) | spread(word >> 16) << 4; }

#ifdef __x86_64__
/* A line of codes to two lines of bytes. */
BYTES INLINE void bytes_int4(__m512i line, __m512i *bytes) {
    const __m512i mask = _mm512_set1_epi8(15);
    bytes[0] = _mm512_and_si512(line, mask);
    bytes[1] = _mm512_and_si512(_mm512_srli_epi16(line, 4), mask);
}
#endif
#endif
