#include "attend.h"

#include <math.h>
#include <string.h>

/* Rows of queries, and keys, that are computed together. */
#define ROWS 32
#define KEYS 32
#define LANES 16
#define VECTORS (MOST_HEAD_SIZE / LANES)

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

/* Convert a row to float32, and fill it up to whole vectors with 0. */
INLINE void
read_row(float *out, const char *from, ptrdiff_t size, bool bfloat16, float scale)
{
    ptrdiff_t d = 0;
    if (bfloat16) {
        const uint16_t *row = (const uint16_t *)from;
        for (; d + LANES <= size; d += LANES) {
            Halves half;
            memcpy(&half, row + d, sizeof half);
            Integers bits = __builtin_convertvector(half, Integers) << 16;
            Vector values;
            memcpy(&values, &bits, sizeof values);
            values *= scale;
            memcpy(out + d, &values, sizeof values);
        }
        for (; d < size; d++) {
            uint32_t bits = (uint32_t)row[d] << 16;
            float value;
            memcpy(&value, &bits, sizeof value);
            out[d] = value * scale;
        }
    }
    else {
        for (; d < size; d++) {
            float value;
            memcpy(&value, from + d * 4, sizeof value);
            out[d] = value * scale;
        }
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

INLINE ptrdiff_t
cache_row(const Layer *layer, const Sequence *sequence, ptrdiff_t position)
{
    ptrdiff_t slot = layer->window > 0 ? position % layer->window : position;
    return layer->tables[sequence->index * layer->blocks + slot / layer->page] * layer->block_rows + slot % layer->page;
}

bool
has_rows(const Layer *layer, const Sequence *sequence)
{
    ptrdiff_t tokens = sequence->past + sequence->count;
    if (layer->window > 0 && tokens > layer->window) {
        tokens = layer->window;
    }
    ptrdiff_t blocks = (tokens + layer->page - 1) / layer->page;
    if (blocks > layer->blocks) {
        return false;
    }
    for (ptrdiff_t b = 0; b < blocks; b++) {
        int32_t block = layer->tables[sequence->index * layer->blocks + b];
        if (block < 0 || block > (layer->cache_rows - layer->page) / layer->block_rows) {
            return false;
        }
    }
    return true;
}

INLINE size_t
value_size(const Layer *layer)
{
    return layer->bfloat16 ? 2 : 4;
}

/* The place of a token's key or value: in the cache, or among the new ones. */
INLINE const char *
row_of(const Layer *layer, const Sequence *sequence, ptrdiff_t position, ptrdiff_t kv_head, bool key)
{
    const char *base;
    ptrdiff_t at;
    if (position < sequence->past) {
        base = key ? layer->k_cache : layer->v_cache;
        at = cache_row(layer, sequence, position) * layer->cache_token + kv_head * layer->head_size;
    }
    else {
        ptrdiff_t token = sequence->first + position - sequence->past;
        base = key ? layer->k : layer->v;
        at = key ? token * layer->k_token + kv_head * layer->k_head : token * layer->v_token + kv_head * layer->v_head;
    }
    return base + at * (ptrdiff_t)value_size(layer);
}

INLINE void
write_new(const Layer *layer, const Sequence *sequence, ptrdiff_t kv_head)
{
    size_t size = (size_t)layer->head_size * value_size(layer);
    ptrdiff_t end = sequence->past + sequence->count;
    ptrdiff_t begin = layer->window > 0 && sequence->count > layer->window ? end - layer->window : sequence->past;
    for (ptrdiff_t position = begin; position < end; position++) {
        ptrdiff_t at = (cache_row(layer, sequence, position) * layer->cache_token + kv_head * layer->head_size) *
                       (ptrdiff_t)value_size(layer);
        memcpy(layer->k_cache + at, row_of(layer, sequence, position, kv_head, true), size);
        memcpy(layer->v_cache + at, row_of(layer, sequence, position, kv_head, false), size);
    }
}

/* ---- attention --------------------------------------------------------------------------------------------- */

typedef struct {
    float q[ROWS][MOST_HEAD_SIZE];
    float out[ROWS][MOST_HEAD_SIZE];
    float keys[KEYS][MOST_HEAD_SIZE];
    float transposed[MOST_HEAD_SIZE][KEYS];
    float values[KEYS][MOST_HEAD_SIZE];
    float scores[ROWS][KEYS];
    float largest[ROWS], total[ROWS];
    ptrdiff_t position[ROWS];
} Tile;

/* Scores of a few rows: products along the head. */
INLINE void
score_few(Tile *tile, ptrdiff_t rows, ptrdiff_t vectors)
{
    for (ptrdiff_t j = 0; j < KEYS; j++) {
        for (ptrdiff_t r = 0; r < rows; r++) {
            Vector sum = {0};
            for (ptrdiff_t i = 0; i < vectors; i++) {
                Vector q, k;
                load(&q, &tile->q[r][i * LANES]);
                load(&k, &tile->keys[j][i * LANES]);
                sum += q * k;
            }
            tile->scores[r][j] = sum_of(&sum);
        }
    }
}

/* Scores of many rows: products along the keys, 4 rows at a time. Rows beyond the last are computed in vain. */
INLINE void
score_many(Tile *tile, ptrdiff_t rows, ptrdiff_t size)
{
    for (ptrdiff_t d = 0; d < size; d++) {
        for (ptrdiff_t j = 0; j < KEYS; j++) {
            tile->transposed[d][j] = tile->keys[j][d];
        }
    }
    for (ptrdiff_t r = 0; r < rows; r += 4) {
        Vector sum[4][2] = {{{0}}};
        for (ptrdiff_t d = 0; d < size; d++) {
            Vector low, high;
            load(&low, &tile->transposed[d][0]);
            load(&high, &tile->transposed[d][LANES]);
            for (int i = 0; i < 4; i++) {
                sum[i][0] += tile->q[r + i][d] * low;
                sum[i][1] += tile->q[r + i][d] * high;
            }
        }
        for (int i = 0; i < 4; i++) {
            memcpy(&tile->scores[r + i][0], &sum[i][0], sizeof(Vector));
            memcpy(&tile->scores[r + i][LANES], &sum[i][1], sizeof(Vector));
        }
    }
}

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

/* Add the weighted values, 4 vectors of a row at a time. */
INLINE void
add_values(Tile *tile, ptrdiff_t rows, ptrdiff_t vectors, ptrdiff_t keys)
{
    for (ptrdiff_t i = 0; i < vectors; i += 4) {
        for (ptrdiff_t r = 0; r < rows; r++) {
            Vector sum[4];
            memcpy(sum, &tile->out[r][i * LANES], sizeof sum);
            for (ptrdiff_t j = 0; j < keys; j++) {
                float weight = tile->scores[r][j];
                for (int n = 0; n < 4; n++) {
                    Vector value;
                    load(&value, &tile->values[j][(i + n) * LANES]);
                    sum[n] += weight * value;
                }
            }
            memcpy(&tile->out[r][i * LANES], sum, sizeof sum);
        }
    }
}

INLINE void
start_row(const Layer *layer, Tile *tile, ptrdiff_t row, ptrdiff_t head, const char *q, ptrdiff_t position)
{
    read_row(tile->q[row], q, layer->head_size, layer->bfloat16, layer->scale);
    memset(tile->out[row], 0, sizeof tile->out[row]);
    tile->position[row] = position;
    tile->largest[row] = layer->sinks == NULL ? -INFINITY : layer->sinks[head];
    tile->total[row] = layer->sinks == NULL ? 0.0f : 1.0f;
}

/* Scores of the keys from `begin` on; -inf for those that a row does not see. */
INLINE void
score(const Layer *layer, Tile *tile, ptrdiff_t rows, ptrdiff_t vectors, ptrdiff_t begin, ptrdiff_t keys, bool masked)
{
    if (rows < 8) {
        score_few(tile, rows, vectors);
    }
    else {
        score_many(tile, rows, layer->head_size);
    }
    for (ptrdiff_t r = 0; r < rows; r++) {
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

FOR_EACH_CPU void
attend(const Layer *layer, const Sequence *sequence, ptrdiff_t kv_head)
{
    Tile tile;
    ptrdiff_t group = layer->heads / layer->kv_heads, size = layer->head_size;
    ptrdiff_t vectors = (size + LANES - 1) / LANES, tokens = ROWS / group > 0 ? ROWS / group : 1;
    size_t bytes = value_size(layer);
    /* More heads than rows are computed in several turns. */
    ptrdiff_t heads = group < ROWS ? group : ROWS;
    /* Vectors are added 4 at a time. */
    memset(tile.values, 0, sizeof tile.values);
    for (ptrdiff_t begun = 0; begun < sequence->count; begun += tokens) {
        ptrdiff_t count = sequence->count - begun < tokens ? sequence->count - begun : tokens;
        ptrdiff_t from = sequence->past + begun, to = from + count;
        ptrdiff_t first = layer->window > 0 && from >= layer->window ? from - layer->window + 1 : 0;
        for (ptrdiff_t turn = 0; turn < group; turn += heads) {
            ptrdiff_t here = group - turn < heads ? group - turn : heads, rows = 0;
            for (ptrdiff_t t = 0; t < count; t++) {
                for (ptrdiff_t g = 0; g < here; g++, rows++) {
                    ptrdiff_t head = kv_head * group + turn + g, token = sequence->first + begun + t;
                    const char *q = layer->q + (token * layer->q_token + head * layer->q_head) * (ptrdiff_t)bytes;
                    start_row(layer, &tile, rows, head, q, from + t);
                }
            }
            for (ptrdiff_t key = first; key < to; key += KEYS) {
                ptrdiff_t keys = to - key < KEYS ? to - key : KEYS;
                for (ptrdiff_t j = 0; j < keys; j++) {
                    read_row(tile.keys[j], row_of(layer, sequence, key + j, kv_head, true), size, layer->bfloat16, 1);
                    read_row(tile.values[j], row_of(layer, sequence, key + j, kv_head, false), size, layer->bfloat16,
                             1);
                }
                bool masked = key + keys > from + 1 || (layer->window > 0 && key < to - layer->window);
                score(layer, &tile, rows, vectors, key, keys, masked || keys < KEYS);
                for (ptrdiff_t r = 0; r < rows; r++) {
                    weigh(&tile, r, vectors);
                }
                add_values(&tile, rows, vectors, keys);
            }
            for (ptrdiff_t r = 0; r < rows; r++) {
                ptrdiff_t head = kv_head * group + turn + r % here, token = sequence->first + begun + r / here;
                for (ptrdiff_t d = 0; d < size; d++) {
                    tile.out[r][d] /= tile.total[r];
                }
                write_row(layer->out + (token * layer->heads + head) * size * (ptrdiff_t)bytes, tile.out[r], size,
                          layer->bfloat16);
            }
        }
    }
    write_new(layer, sequence, kv_head);
}
