/* int8, unsigned: of a word's four inputs, byte j is the j-th. */
#ifdef VECTOR_BYTES
TARGET INLINE Floats NAME(values_int8)(Words line, int j, Floats zero) {
    return NAME(integers)(line >> 8 * j & 255) - zero;
}
#else
static inline uint32_t arrange_int8(uint32_t word) { return word; }

#ifdef __x86_64__
BYTES INLINE void bytes_int8(__m512i line, __m512i *bytes) { bytes[0] = line; }
#endif
#endif
