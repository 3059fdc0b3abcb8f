/* Numbers of the persistent kernel: bfloat16, products, and the experts' activations. */
#pragma once

#include "lanes.h"

/* Of activation.py's ActivationKind. */
enum { ACT_SILU, ACT_GELU, ACT_GELU_TANH, ACT_RELU, ACT_RELU_SQUARED, ACT_CLAMPED_SWIGLU };

POLL float low_half(word pair) { return from_bits(pair << 16); }
POLL float high_half(word pair) { return from_bits(pair & 0xffff0000u); }

/* Nearest, ties to even; NaN stays. */
POLL uint16_t to_bfloat16(float value)
{
    word bits = to_bits(value);
    if (value != value) {
        return (uint16_t)(bits >> 16 | 0x40);
    }
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Rows of an expert that share a read of its weights, and weights of a load. */
enum { ROWS = 4, VECTOR = 8 };

/* A row of a matrix times ROWS rows of inputs. */
struct Product {
    float sums[ROWS];
};

/* Add a warp's products of a matrix row with input rows; the rows behind the last one repeat it. */
POLL Product multiply(const word *weights, const word *const *inputs, word count)
{
    Product product = {};
    for (word at = LANE % WARP * VECTOR; at < count; at += WARP * VECTOR) {
        word eight[VECTOR / 2];
        memcpy(eight, __builtin_assume_aligned(weights + at / 2, 16), sizeof eight);
        UNROLL
        for (int row = 0; row < ROWS; row++) {
            word x[VECTOR / 2];
            memcpy(x, __builtin_assume_aligned(inputs[row] + at / 2, 16), sizeof x);
            UNROLL
            for (int i = 0; i < VECTOR / 2; i++) {
                product.sums[row] += low_half(eight[i]) * low_half(x[i]);
                product.sums[row] += high_half(eight[i]) * high_half(x[i]);
            }
        }
    }
    UNROLL
    for (int row = 0; row < ROWS; row++) {
        product.sums[row] = warp_sum(product.sums[row]);
    }
    return product;
}

POLL float sigmoid(float x)
{
    float small = expf(-fabsf(x));
    return (x >= 0 ? 1.0f : small) / (1.0f + small);
}

struct Activation {
    word kind, has_gate;
    float alpha, limit;
};

/* As `_activate` of products.py; comparisons keep NaN. */
POLL float activate(float gate, float up, const Activation &form)
{
    float out = gate;
    switch (form.kind) {
    case ACT_CLAMPED_SWIGLU:
        gate = gate > form.limit ? form.limit : gate;
        up = up > form.limit ? form.limit : up;
        up = (up < -form.limit ? -form.limit : up) + 1.0f;
        out = gate * sigmoid(form.alpha * gate);
        break;
    case ACT_SILU:
        out = gate * sigmoid(gate);
        break;
    case ACT_GELU:
        out = 0.5f * gate * (1.0f + erff(gate * 0.70710678f));
        break;
    case ACT_GELU_TANH:
        out = gate * sigmoid(1.59576912f * (gate + 0.044715f * gate * gate * gate));
        break;
    case ACT_RELU:
        out = gate < 0 ? 0.0f : gate;
        break;
    case ACT_RELU_SQUARED:
        out = gate < 0 ? 0.0f : gate * gate;
        break;
    }
    return form.has_gate ? out * up : out;
}
