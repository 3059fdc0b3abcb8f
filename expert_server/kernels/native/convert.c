/* Rows from one format to another. */
#include "native.h"

#include <string.h>

static void widen(const uint16_t *x, int width, uint32_t *out) {
    for (int i = 0; i < width; i++) out[i] = (uint32_t)x[i] << 16;
}

/* The nearest bfloat16; ties to even. */
static inline uint16_t nearest(uint32_t bits) {
    const uint32_t is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return (uint16_t)(is_nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void narrow(const uint32_t *x, int width, uint16_t *out) {
    for (int i = 0; i < width; i++) out[i] = nearest(x[i]);
}

EACH_VECTOR_WIDTH
void convert_row(const char *x, Format from, int width, Format to, char *out) {
    if (from == to)
        memcpy(out, x, (size_t)width * format_bytes(to));
    else if (to == FLOAT32)
        widen((const uint16_t *)x, width, (uint32_t *)out);
    else
        narrow((const uint32_t *)x, width, (uint16_t *)out);
}

static inline uint32_t value_of(const char *x, Format from, int32_t at) {
    return from == FLOAT32 ? ((const uint32_t *)x)[at] : (uint32_t)((const uint16_t *)x)[at] << 16;
}

EACH_VECTOR_WIDTH
void reorder_row(const char *x, Format from, const int32_t *order, int width, Format to, char *out) {
    if (to == from && to == BFLOAT16)
        for (int i = 0; i < width; i++) ((uint16_t *)out)[i] = ((const uint16_t *)x)[order[i]];
    else if (to == FLOAT32)
        for (int i = 0; i < width; i++) ((uint32_t *)out)[i] = value_of(x, from, order[i]);
    else
        for (int i = 0; i < width; i++) {
            const uint32_t value = value_of(x, from, order[i]);
            narrow(&value, 1, (uint16_t *)out + i);
        }
}

EACH_VECTOR_WIDTH
void add_bfloat16(const float *values, const float *bias, float score, int width, float *out) {
    for (int i = 0; i < width; i++) {
        const float weighted = score * (bias ? values[i] + bias[i] : values[i]);
        uint32_t bits;
        memcpy(&bits, &weighted, sizeof bits);
        bits = (uint32_t)nearest(bits) << 16;
        float rounded;
        memcpy(&rounded, &bits, sizeof rounded);
        out[i] += rounded;
    }
}
