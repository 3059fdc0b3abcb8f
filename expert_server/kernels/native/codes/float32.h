/* float32: a word is an input. */
#ifdef VECTOR_BYTES
TARGET INLINE Floats NAME(values_float32)(Words line, int j, Floats zero) {
    (void)j, (void)zero;
    return (Floats)line;
}
#endif
