/* What the kernels of `attend` share: vectors, places in the cache, and a tile of rows that are computed together. */
#ifndef EAAS_TILE_H
#define EAAS_TILE_H

#include "attend.h"

#include <math.h>
#include <string.h>

/* Rows of queries, and keys, that are computed together. */
#define ROWS 32
#define KEYS 32
/* So many heads of one key-value head are computed from the cache as it lies; more rows pay for a conversion. */
#define FEW_ROWS 8
#define LANES 16

#if defined(__x86_64__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "arch=haswell", "default")))
#else
#define FOR_EACH_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef float Half __attribute__((vector_size(LANES * 2)));
typedef float Quarter __attribute__((vector_size(LANES)));

/* ---- vectors ----------------------------------------------------------------------------------------------- */

INLINE void
load(Vector *out, const float *from)
{
    memcpy(out, from, sizeof *out);
}

INLINE float
sum_of(const Vector *values)
{
    Half low, high;
    memcpy(&low, values, sizeof low);
    memcpy(&high, (const char *)values + sizeof low, sizeof high);
    low += high;
    Quarter first, second;
    memcpy(&first, &low, sizeof first);
    memcpy(&second, (const char *)&low + sizeof first, sizeof second);
    first += second;
    return (first[0] + first[1]) + (first[2] + first[3]);
}

INLINE Integers
bits_of(const Vector *values)
{
    Integers bits;
    memcpy(&bits, values, sizeof bits);
    return bits;
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
    Integers power = (bits_of(&shifted) - 0x4b400000) << 23;
    Integers bits = ((bits_of(&p) + power) & is_normal) | (bits_of(&x) & ~is_number);
    memcpy(values, &bits, sizeof bits);
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
    Integers bits = __builtin_convertvector(half, Integers) << 16;
    memcpy(out, &bits, sizeof bits);
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

/* ---- tiles ------------------------------------------------------------------------------------------------- */

typedef struct {
    float q[ROWS][MOST_HEAD_SIZE];
    float out[ROWS][MOST_HEAD_SIZE];
    /* Keys and values of this block, and of the next one, which is prefetched. */
    const char *key_rows[2][KEYS], *value_rows[2][KEYS];
    /* Bytes to the same token's next head. */
    ptrdiff_t key_step[2][KEYS], value_step[2][KEYS];
    int block;
    /* Of one block, in the order of the kernel: float32 or pairs of bfloat16. */
    float keys[KEYS][MOST_HEAD_SIZE];
    float transposed[MOST_HEAD_SIZE][KEYS];
    float values[KEYS][MOST_HEAD_SIZE];
    uint32_t q_pairs[ROWS][MOST_HEAD_SIZE / 2], weight_pairs[ROWS][KEYS / 2];
    float scores[ROWS][KEYS];
    float largest[ROWS], total[ROWS];
    ptrdiff_t position[ROWS];
} Tile;

/* Turn a row's scores into weights, and scale what was summed before by a larger score. */
INLINE void
weigh(Tile *tile, ptrdiff_t row, ptrdiff_t vectors)
{
    float *scores = tile->scores[row], largest = tile->largest[row];
    for (ptrdiff_t j = 0; j < KEYS; j++) {
        largest = scores[j] > largest ? scores[j] : largest;
    }
    if (largest == -INFINITY) {
        /* The row sees none of these keys. */
        memset(scores, 0, sizeof tile->scores[row]);
        return;
    }
    Vector low, high;
    load(&low, scores);
    load(&high, scores + LANES);
    low -= largest;
    high -= largest;
    exponential(&low);
    exponential(&high);
    memcpy(scores, &low, sizeof low);
    memcpy(scores + LANES, &high, sizeof high);
    low += high;
    if (largest > tile->largest[row]) {
        float factor = expf(tile->largest[row] - largest);
        tile->total[row] *= factor;
        for (ptrdiff_t i = 0; i < vectors; i++) {
            Vector out;
            load(&out, &tile->out[row][i * LANES]);
            out *= factor;
            memcpy(&tile->out[row][i * LANES], &out, sizeof out);
        }
        tile->largest[row] = largest;
    }
    tile->total[row] += sum_of(&low);
}

/* Sums of values are computed 4 vectors at a time. */
INLINE ptrdiff_t
whole_groups(ptrdiff_t size)
{
    return (size + 4 * LANES - 1) / (4 * LANES) * (4 * LANES);
}

INLINE void
start_row(const Layer *layer, Tile *tile, ptrdiff_t row, ptrdiff_t head, const char *q, ptrdiff_t position)
{
    read_row(tile->q[row], q, layer->head_size, layer->bfloat16, layer->scale);
    memset(tile->out[row], 0, (size_t)whole_groups(layer->v_size) * sizeof(float));
    tile->position[row] = position;
    tile->largest[row] = layer->sinks == NULL ? -INFINITY : layer->sinks[head];
    tile->total[row] = layer->sinks == NULL ? 0.0f : 1.0f;
}

/* Bound the scores, and set those of keys that a row does not see to -inf. */
INLINE void
mask(const Layer *layer, Tile *tile, ptrdiff_t first_row, ptrdiff_t end_row, ptrdiff_t begin, ptrdiff_t keys, bool masked)
{
    for (ptrdiff_t r = first_row; r < end_row; r++) {
        for (ptrdiff_t j = 0; j < keys && layer->softcap > 0; j++) {
            tile->scores[r][j] = layer->softcap * tanhf(tile->scores[r][j] / layer->softcap);
        }
        ptrdiff_t last = tile->position[r], first = layer->window > 0 ? last - layer->window + 1 : 0;
        for (ptrdiff_t j = masked ? 0 : keys; j < KEYS; j++) {
            if (j >= keys || begin + j > last || begin + j < first) {
                tile->scores[r][j] = -INFINITY;
            }
        }
    }
}

/* Find the next block of keys up to `end`, and begin to read it. */
INLINE void
find_rows(const Layer *layer, const Sequence *sequence, ptrdiff_t kv_head, ptrdiff_t heads, Cursor *cursor,
          ptrdiff_t end, Tile *tile)
{
    ptrdiff_t size = (ptrdiff_t)value_size(layer), k_head = layer->k_cache_head * size, v_head = layer->v_cache_head * size;
    ptrdiff_t k_bytes = (heads - 1) * k_head + layer->head_size * size, v_bytes = (heads - 1) * v_head + layer->v_size * size;
    int next = !tile->block;
    for (ptrdiff_t j = 0; j < KEYS && cursor->position < end; j++) {
        bool is_new = cursor->position >= sequence->past;
        tile->key_step[next][j] = is_new ? layer->k_head * size : k_head;
        tile->value_step[next][j] = is_new ? layer->v_head * size : v_head;
        next_row(layer, sequence, kv_head, cursor, &tile->key_rows[next][j], &tile->value_rows[next][j]);
        /* To L2: it waits for more lines at a time than L1, whose waits would stop this loop. */
        for (ptrdiff_t at = 0; at < k_bytes; at += 64) {
            __builtin_prefetch(tile->key_rows[next][j] + at, 0, 2);
        }
        for (ptrdiff_t at = 0; at < v_bytes && tile->value_rows[next][j] != tile->key_rows[next][j]; at += 64) {
            __builtin_prefetch(tile->value_rows[next][j] + at, 0, 2);
        }
    }
}

INLINE void
write_out(const Layer *layer, Tile *tile, ptrdiff_t row, ptrdiff_t token, ptrdiff_t head)
{
    for (ptrdiff_t d = 0; d < layer->v_size; d++) {
        tile->out[row][d] /= tile->total[row];
    }
    ptrdiff_t at = (token * layer->heads + head) * layer->v_size * (ptrdiff_t)value_size(layer);
    write_row(layer->out + at, tile->out[row], layer->v_size, layer->bfloat16);
}

INLINE const char *
query_of(const Layer *layer, ptrdiff_t token, ptrdiff_t head)
{
    return layer->q + (token * layer->q_token + head * layer->q_head) * (ptrdiff_t)value_size(layer);
}

#endif
