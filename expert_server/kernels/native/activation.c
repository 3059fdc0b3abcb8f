/* From the first product to the input of the second one. */
#include "native.h"

#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

/* A panel of values; the compiler maps it to the CPU's vectors. Loops over floats are not vectorised reliably. */
typedef float Values __attribute__((vector_size(PANEL * 4)));
typedef int32_t Words __attribute__((vector_size(PANEL * 4)));

INLINE Values choose(Words condition, Values yes, Values no) {
    return (Values)((condition & (Words)yes) | (~condition & (Words)no));
}

/* Comparisons that keep NaN, as torch's clamp does. */
INLINE Values at_most(Values x, float limit) { return choose(x > limit, (Values){0} + limit, x); }
INLINE Values at_least(Values x, float limit) { return choose(x < limit, (Values){0} + limit, x); }

/* e^x to about 2 units in the last place; saturates, keeps NaN. */
INLINE Values exp_(Values x) {
    const float round = 12582912.0f; /* 1.5 * 2^23: adding it leaves an integer in the low bits. */
    const Values clamped = at_least(at_most(x, 88.0f), -87.0f);
    const Values shifted = clamped * 1.44269504088896341f + round;
    const Values n = shifted - round;
    Values r = clamped - n * 0.693359375f; /* ln 2 in two parts */
    r = r + n * 2.12194440e-4f;
    Values p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Words power = (((Words)shifted - 0x4b400000) + 127) << 23; /* 2^n, n from -126 to 127 */
    return choose(x != x, x, p * (Values)power);
}

/* Zero if e^-x saturates: else x * sigmoid(x) would grow again. */
INLINE Values sigmoid(Values x) { return choose(x < -87.0f, (Values){0}, 1.0f / (1.0f + exp_(-x))); }

INLINE Values each(float (*function)(float), Values x) {
    for (int i = 0; i < PANEL; i++) x[i] = function(x[i]);
    return x;
}

INLINE Values ungated(ActivationKind kind, Values x) {
    switch (kind) {
    case SILU: return x * sigmoid(x);
    case GELU: return 0.5f * x * (1.0f + each(erff, x * 0.70710678118654752f));
    case GELU_TANH: return 0.5f * x * (1.0f + each(tanhf, 0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case RELU: return at_least(x, 0.0f);
    case RELU_SQUARED: return at_least(x, 0.0f) * at_least(x, 0.0f);
    default: return x; /* CLAMPED_SWIGLU has a gate. */
    }
}

/* Rounds to nearest, ties to even; NaN stays NaN. The result is in the upper halves of the words. */
INLINE Words rounded_bf16(Values x) {
    typedef uint32_t Bits __attribute__((vector_size(PANEL * 4)));
    const Bits bits = (Bits)x;
    const Words rounded = (Words)(bits + 0x7fff + ((bits >> 16) & 1));
    return (Words)choose(x != x, (Values)((Words)bits | 0x400000), (Values)rounded);
}

INLINE void row(ActivationKind kind, const Activation *activation, const float *product, const float *bias,
                int panels, void *out, Format format) {
    const int step = activation->has_gate ? 2 : 1;
    for (int p = 0; p < panels; p += step) {
        Values gate, up, result;
        memcpy(&gate, product + p * PANEL, sizeof gate);
        memcpy(&up, product + (p + step - 1) * PANEL, sizeof up);
        if (bias != NULL) {
            Values gate_bias, up_bias;
            memcpy(&gate_bias, bias + p * PANEL, sizeof gate_bias);
            memcpy(&up_bias, bias + (p + step - 1) * PANEL, sizeof up_bias);
            gate += gate_bias;
            up += up_bias;
        }
        if (kind == CLAMPED_SWIGLU) {
            gate = at_most(gate, activation->limit);
            up = at_least(at_most(up, activation->limit), -activation->limit);
            result = gate * sigmoid(activation->alpha * gate) * (up + 1.0f);
        } else {
            result = ungated(kind, gate);
            if (activation->has_gate) result *= up;
        }
        const size_t at = (size_t)(p / step) * PANEL;
        if (format == BFLOAT16) {
            typedef uint16_t Halves __attribute__((vector_size(PANEL * 2)));
            const Halves halves = __builtin_convertvector(rounded_bf16(result) >> 16, Halves);
            memcpy((uint16_t *)out + at, &halves, sizeof halves);
        } else {
            memcpy((float *)out + at, &result, sizeof result);
        }
    }
}

EACH_VECTOR_WIDTH
void activate(const Activation *activation, const float *product, const float *bias, int panels, void *out,
              Format format) {
    switch (activation->kind) {
    case SILU: row(SILU, activation, product, bias, panels, out, format); break;
    case CLAMPED_SWIGLU: row(CLAMPED_SWIGLU, activation, product, bias, panels, out, format); break;
    case GELU: row(GELU, activation, product, bias, panels, out, format); break;
    case GELU_TANH: row(GELU_TANH, activation, product, bias, panels, out, format); break;
    case RELU: row(RELU, activation, product, bias, panels, out, format); break;
    case RELU_SQUARED: row(RELU_SQUARED, activation, product, bias, panels, out, format); break;
    }
}
