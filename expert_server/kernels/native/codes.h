/* Decodes each code of weights: a header of codes/ per code. Not for one inclusion only: gemm_portable.h includes it for
 * each width of the compiler's vectors.
 *
 * A header has for its code, of each kind of product that takes it (EACH_... of native.h):
 *
 *     values     input j of a line to float32, in the compiler's vectors, less the integers' zero
 *     arrange    (not of floats) a word of consecutive inputs, as QuantizedMatrix has them, to a word of a panel
 *     pairs      (bfloat16, narrow floats) a line to lines of pairs in bfloat16, exact
 *     scaled     (with EXPONENTS) the same times a power of two
 *     bytes      (integers) a line to lines of unsigned bytes
 */
#define INLINE static inline __attribute__((always_inline))

#ifdef VECTOR_BYTES
/* Small integers plus 2^23, which has them in its last bits: a conversion that every vector unit can do. */
TARGET INLINE Floats NAME(integers)(Words integers) { return (Floats)(integers | 0x4b000000); }
#elif defined(__x86_64__)
#include <immintrin.h>

#define PAIRS __attribute__((target("avx512f,avx512bw,avx512vbmi")))
#define BYTES __attribute__((target("avx512f,avx512bw")))
/* Lines of pairs that a line of codes becomes. */
#define PAIR_LINES(weights) (inputs_per_line(weights) / 2)

static inline bool can_decode_pairs(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vbmi");
}
#endif

#include "codes/bfloat16.h"
#include "codes/float32.h"
#include "codes/fp8.h"
#include "codes/int4.h"
#include "codes/int8.h"
#include "codes/mxfp4.h"

/* Each decoder below is one for all formats: `weights` is a constant after inlining. */
#ifdef VECTOR_BYTES
#define VALUES(FORMAT, CODE, ...) case FORMAT: return NAME(values_##CODE)(line, j, zero);
TARGET INLINE Floats NAME(values)(const Format weights, Words line, const int j, Floats zero) {
    switch (weights) { EACH_FORMAT(VALUES) default: __builtin_unreachable(); }
}
#undef VALUES
#elif defined(__x86_64__)
#define DECODE(FORMAT, CODE, ...) case FORMAT: pairs_##CODE(line, pairs); break;
PAIRS INLINE void decode_pairs(const Format weights, __m512i line, __m512i *pairs) {
    switch (weights) { DECODE(BFLOAT16, bfloat16) EACH_NARROW_FLOAT(DECODE) default: __builtin_unreachable(); }
}
#undef DECODE

#define DECODE(FORMAT, CODE, ...) case FORMAT: bytes_##CODE(line, bytes); break;
BYTES INLINE void decode_bytes(const Format weights, __m512i line, __m512i *bytes) {
    switch (weights) { EACH_INTEGER(DECODE) default: __builtin_unreachable(); }
}
#undef DECODE

/* EXPONENTS of the g-th group of the segment whose line of scales is `line`. */
PAIRS INLINE __m512i exponents(__m512i line, int g) {
    return _mm512_and_si512(_mm512_srli_epi32(line, 8 * (unsigned)g), _mm512_set1_epi32(0xff));
}

/* What `scaled` subtracts from the exponents of its largest values, in both halves of a word. 2^-127 counts as 2^-126. */
PAIRS INLINE __m512i lowered(__m512i line, int g) {
    const __m512i exponent = _mm512_max_epi32(exponents(line, g), _mm512_set1_epi32(1));
    const __m512i by = _mm512_slli_epi32(_mm512_sub_epi32(_mm512_set1_epi32(LARGEST_EXPONENT), exponent), 7);
    return _mm512_or_si512(by, _mm512_slli_epi32(by, 16));
}

/* A line of a format with EXPONENTS to pairs with their scales. */
PAIRS INLINE void decode_scaled(const Format weights, __m512i line, __m512i by, __m512i *pairs) {
    if (weights == MXFP4) scaled_mxfp4(line, by, pairs);
}
#endif
