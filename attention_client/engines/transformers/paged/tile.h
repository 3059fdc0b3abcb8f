/* What the kernels of `attend` share: vectors, and places in the cache. The file that includes this defines TARGET, an
 * attribute of all functions, and VECTOR_BYTES: vectors that are wider than the processor's would be kept in memory. */
#ifndef EAAS_TILE_H
#define EAAS_TILE_H

#include "attend.h"

#include <math.h>
#include <string.h>

#define LANES (VECTOR_BYTES / 4)
#define INLINE static inline __attribute__((always_inline)) TARGET

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef float Quarter __attribute__((vector_size(16)));

/* ---- vectors ----------------------------------------------------------------------------------------------- */

INLINE void
load(Vector *out, const float *from)
{
    memcpy(out, from, sizeof *out);
}

INLINE float
sum_of(const Vector *values)
{
    Quarter sum, next;
    memcpy(&sum, values, sizeof sum);
    for (size_t at = sizeof sum; at < sizeof *values; at += sizeof next) {
        memcpy(&next, (const char *)values + at, sizeof next);
        sum += next;
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* exp(x) for x <= 0, to about 1e-7: a polynomial of the fraction of x / ln 2, and the whole part as exponent. What is
 * smaller than the smallest normal number counts as 0; NaN stays. */
INLINE void
exponential(Vector *values)
{
    Vector x = *values * 1.44269504f;
    Integers is_number = x == x, is_normal = x > -126.0f;
    Vector shifted = x + 12582912.0f; /* rounds to a whole number: 1.5 * 2^23 */
    Vector f = x - (shifted - 12582912.0f);
    Vector p = (Vector){0} + 1.5403530e-4f;
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    Integers power = ((Integers)shifted - 0x4b400000) << 23;
    *values = (Vector)((((Integers)p + power) & is_normal) | ((Integers)x & ~is_number));
}

/* Load values of either type as float32. */
INLINE void
load_values(Vector *out, const char *row, ptrdiff_t at, bool bfloat16)
{
    if (!bfloat16) {
        memcpy(out, row + at * 4, sizeof *out);
        return;
    }
    Halves half;
    memcpy(&half, row + at * 2, sizeof half);
    *out = (Vector)(__builtin_convertvector(half, Integers) << 16);
}

/* Convert a row to float32, and fill it up to whole vectors with 0. */
INLINE void
read_row(float *out, const char *from, ptrdiff_t size, bool bfloat16, float scale)
{
    ptrdiff_t d = 0;
    for (; d + LANES <= size; d += LANES) {
        Vector values;
        load_values(&values, from, d, bfloat16);
        values *= scale;
        memcpy(out + d, &values, sizeof values);
    }
    for (; d < size; d++) {
        uint32_t bits = 0;
        memcpy((char *)&bits + (bfloat16 ? 2 : 0), from + d * (bfloat16 ? 2 : 4), bfloat16 ? 2 : 4);
        float value;
        memcpy(&value, &bits, sizeof value);
        out[d] = value * scale;
    }
    for (; d % LANES != 0; d++) {
        out[d] = 0.0f;
    }
}

/* To the nearest, with ties to even, as torch does. */
INLINE void
write_row(char *to, const float *from, ptrdiff_t size, bool bfloat16)
{
    if (!bfloat16) {
        memcpy(to, from, (size_t)size * 4);
        return;
    }
    uint16_t *out = (uint16_t *)to;
    for (ptrdiff_t d = 0; d < size; d++) {
        uint32_t bits;
        memcpy(&bits, &from[d], sizeof bits);
        out[d] = from[d] == from[d] ? (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16) : 0x7fc0;
    }
}

/* ---- cache ------------------------------------------------------------------------------------------------- */

INLINE size_t
value_size(const Layer *layer)
{
    return layer->bfloat16 ? 2 : 4;
}

/* A place among a sequence's tokens, which moves forward without divisions. */
typedef struct {
    ptrdiff_t position, block, offset, slot;
} Cursor;

INLINE Cursor
cursor_at(const Layer *layer, ptrdiff_t position)
{
    ptrdiff_t slot = layer->window > 0 ? position % layer->window : position;
    return (Cursor){position, slot / layer->page, slot % layer->page, slot};
}

/* Return where the token's key and value are, in the cache or among the new ones, and go to the next token. */
INLINE void
next_row(const Layer *layer, const Sequence *sequence, ptrdiff_t kv_head, Cursor *cursor, const char **key,
         const char **value)
{
    ptrdiff_t bytes = (ptrdiff_t)value_size(layer);
    if (cursor->position < sequence->past) {
        ptrdiff_t row = layer->tables[sequence->index * layer->blocks + cursor->block] * layer->block_rows + cursor->offset;
        *key = layer->k_cache + (row * layer->k_cache_token + kv_head * layer->k_cache_head) * bytes;
        *value = layer->v_cache + (row * layer->v_cache_token + kv_head * layer->v_cache_head) * bytes;
    }
    else {
        ptrdiff_t token = sequence->first + cursor->position - sequence->past;
        *key = layer->k + (token * layer->k_token + kv_head * layer->k_head) * bytes;
        *value = layer->v + (token * layer->v_token + kv_head * layer->v_head) * bytes;
    }
    cursor->position++;
    cursor->slot++;
    cursor->offset++;
    if (layer->window > 0 && cursor->slot == layer->window) {
        cursor->slot = cursor->block = cursor->offset = 0;
    }
    else if (cursor->offset == layer->page) {
        cursor->offset = 0;
        cursor->block++;
    }
}

INLINE const char *
query_of(const Layer *layer, ptrdiff_t token, ptrdiff_t head)
{
    return layer->q + (token * layer->q_token + head * layer->q_head) * (ptrdiff_t)value_size(layer);
}

INLINE char *
out_of(const Layer *layer, ptrdiff_t token, ptrdiff_t head)
{
    return layer->out + (token * layer->heads + head) * layer->v_size * (ptrdiff_t)value_size(layer);
}

#endif
