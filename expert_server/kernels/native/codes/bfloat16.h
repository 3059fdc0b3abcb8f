/* bfloat16: a pair, the first input in the lower half of a word. */
#ifdef VECTOR_BYTES
TARGET INLINE Floats NAME(values_bfloat16)(Words line, int j, Floats zero) {
    (void)zero;
    return (Floats)(j == 0 ? line << 16 : line & 0xffff0000u); /* The upper half of a float32. */
}
#else
#ifdef __x86_64__
PAIRS INLINE void pairs_bfloat16(__m512i line, __m512i *pairs) { pairs[0] = line; }
#endif
#endif
