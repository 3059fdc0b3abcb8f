/* Activations for integer products: 15 bits in two bytes, see SplitTail in native.h. */
#include "native.h"

#include <math.h>
#include <string.h>

#define LARGEST 16319.0f /* 127 * 128 + 63 */
#define SMALLEST 1e-30f  /* Rows below it count as zeros: their scale would lose digits. */
#define INLINE static inline __attribute__((always_inline))

/* The compiler maps them to the CPU's vectors. Loops over floats are not vectorised reliably. */
#define LANES 16
typedef float Values __attribute__((vector_size(LANES * 4)));
typedef int32_t Words __attribute__((vector_size(LANES * 4)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

/* Loads up to LANES values; the rest are zeros. */
INLINE Values load(const float *x, int count) {
    Values values = {0};
    if (count >= LANES)
        memcpy(&values, x, sizeof values);
    else if (count > 0)
        memcpy(&values, x, (size_t)count * sizeof *x);
    return values;
}

INLINE void store(Words words, char *to) {
    const Bytes bytes = __builtin_convertvector(words, Bytes);
    memcpy(to, &bytes, sizeof bytes);
}

/* The largest magnitude; infinite or NaN if a value is. */
INLINE float largest_of(const float *x, int width) {
    Words most = {0};
    for (int at = 0; at < width; at += LANES) {
        /* Compared as integers, NaN is the largest. */
        const Words bits = (Words)load(x + at, width - at) & 0x7fffffff;
        const Words is_more = bits > most;
        most = (bits & is_more) | (most & ~is_more);
    }
    int32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits = most[i] > bits ? most[i] : bits;
    float largest;
    memcpy(&largest, &bits, sizeof largest);
    return largest;
}

EACH_VECTOR_WIDTH
void split_row(const float *x, int width, Format weights, char *row) {
    const int k = padded_k(weights, width), group_k = group_inputs(weights);
    const int together = group_k < SPLIT_K ? group_k : SPLIT_K;
    const float largest = largest_of(x, width);
    const bool is_zero = !(largest > SMALLEST && largest < INFINITY);
    const float inverse = is_zero ? 0.0f : LARGEST / largest;
    for (int at = 0; at < k; at += SPLIT_K) {
        Words high[SPLIT_K / LANES], low[SPLIT_K / LANES];
        for (int i = 0; i < SPLIT_K / LANES; i++) {
            const Values values = is_zero ? (Values){0} : load(x + at + i * LANES, width - at - i * LANES);
            /* Adding 1.5 * 2^23 leaves the nearest integer in the last bits. */
            const Words integers = (Words)(values * inverse + 12582912.0f) - 0x4b400000;
            high[i] = (integers + 64) >> 7;
            low[i] = integers - (high[i] << 7);
        }
        /* Store last: `row` may overlap x. */
        for (int i = 0; i < SPLIT_K / LANES; i++) {
            store(high[i], row + 2 * (size_t)at + i * LANES);
            store(low[i], row + 2 * (size_t)at + SPLIT_K + i * LANES);
        }
    }
    const int factor = has_one_zero(weights) ? -layouts[weights].zero : -1;
    SplitTail *tail = split_tail(row, k);
    tail->scale = largest < INFINITY ? largest / LARGEST : NAN;
    for (int begin = 0; begin < k; begin += group_k) {
        const int end = k - begin < group_k ? k : begin + group_k;
        int32_t high = 0, low = 0;
        for (int at = begin; at < end; at += together) {
            const int8_t *bytes = (const int8_t *)row + split_at(at);
            for (int i = 0; i < together; i++) high += bytes[i];
            for (int i = 0; i < together; i++) low += bytes[SPLIT_K + i];
        }
        tail->of_zeros[begin / group_k] = (128 * high + low) * factor;
    }
}
