#include "attend.h"

#include <math.h>
#include <string.h>

/* Rows of queries, and keys, that are computed together. */
#define ROWS 32
#define KEYS 32
/* So many heads of one key-value head are computed from the cache as it lies; more rows pay for a conversion. */
#define FEW_ROWS 8
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

/* Load twice as many values as a vector has, in half the steps: bfloat16 as those of even and those of odd index. */
INLINE void
load_pair(Vector *first, Vector *second, const char *row, ptrdiff_t at, bool bfloat16)
{
    if (!bfloat16) {
        memcpy(first, row + at * 4, sizeof *first);
        memcpy(second, row + at * 4 + sizeof *first, sizeof *second);
        return;
    }
    Integers bits, even, odd;
    memcpy(&bits, row + at * 2, sizeof bits);
    even = bits << 16;
    odd = bits & (int32_t)0xffff0000;
    memcpy(first, &even, sizeof even);
    memcpy(second, &odd, sizeof odd);
}

/* Order a row as `load_pair` does bfloat16, or back. */
INLINE void
reorder(float *row, ptrdiff_t size, bool back)
{
    float ordered[2 * LANES];
    for (ptrdiff_t d = 0; d < size; d += 2 * LANES) {
        for (ptrdiff_t i = 0; i < 2 * LANES; i++) {
            ptrdiff_t at = i % 2 * LANES + i / 2;
            ordered[back ? i : at] = row[d + (back ? at : i)];
        }
        memcpy(row + d, ordered, sizeof ordered);
    }
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
        ptrdiff_t at = (row * layer->cache_token + kv_head * layer->head_size) * bytes;
        *key = layer->k_cache + at;
        *value = layer->v_cache + at;
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

INLINE void
write_new(const Layer *layer, const Sequence *sequence, ptrdiff_t kv_head)
{
    size_t size = (size_t)layer->head_size * value_size(layer);
    ptrdiff_t end = sequence->past + sequence->count;
    ptrdiff_t begin = layer->window > 0 && sequence->count > layer->window ? end - layer->window : sequence->past;
    /* With all tokens in the past, a walk stays in the cache. */
    Sequence all = {sequence->index, 0, 0, end};
    Cursor to = cursor_at(layer, begin), from = to;
    while (from.position < end) {
        const char *key, *value, *new_key, *new_value;
        next_row(layer, sequence, kv_head, &from, &new_key, &new_value);
        next_row(layer, &all, kv_head, &to, &key, &value);
        memcpy((char *)key, new_key, size);
        memcpy((char *)value, new_value, size);
    }
}

/* ---- attention --------------------------------------------------------------------------------------------- */

typedef struct {
    float q[ROWS][MOST_HEAD_SIZE];
    float out[ROWS][MOST_HEAD_SIZE];
    /* Keys and values of this block, and of the next one, which is prefetched. */
    const char *key_rows[2][KEYS], *value_rows[2][KEYS];
    /* Bytes to the same token's next head. */
    ptrdiff_t key_step[2][KEYS], value_step[2][KEYS];
    int block;
    float keys[KEYS][MOST_HEAD_SIZE];
    float transposed[MOST_HEAD_SIZE][KEYS];
    float values[KEYS][MOST_HEAD_SIZE];
    float scores[ROWS][KEYS];
    float largest[ROWS], total[ROWS];
    ptrdiff_t position[ROWS];
} Tile;

/* Scores of one token's rows from `begin` to `end`, 2 at a time: products along the head, from the keys of a head where
 * they lie. */
INLINE void
score_few(Tile *tile, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t vectors, ptrdiff_t keys, ptrdiff_t head, bool bfloat16)
{
    for (ptrdiff_t j = 0; j < keys; j++) {
        const char *row = tile->key_rows[tile->block][j] + head * tile->key_step[tile->block][j];
        for (ptrdiff_t first = begin; first < end; first += 2) {
            Vector low = {0}, high = {0};
            for (ptrdiff_t i = 0; i < vectors; i += 2) {
                Vector key[2], q[4];
                load_pair(&key[0], &key[1], row, i * LANES, bfloat16);
                memcpy(&q[0], &tile->q[first][i * LANES], 2 * sizeof(Vector));
                memcpy(&q[2], &tile->q[first + 1][i * LANES], 2 * sizeof(Vector));
                low += q[0] * key[0];
                high += q[2] * key[0];
                low += q[1] * key[1];
                high += q[3] * key[1];
            }
            tile->scores[first][j] = sum_of(&low);
            tile->scores[first + 1][j] = sum_of(&high);
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

/* Add the weighted values of these rows, 2 rows by 4 vectors at a time. */
INLINE void
add_few(Tile *tile, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t vectors, ptrdiff_t keys, ptrdiff_t head, bool bfloat16)
{
    for (ptrdiff_t i = 0; i < vectors; i += 4) {
        for (ptrdiff_t first = begin; first < end; first += 2) {
            Vector sum[2][4];
            for (int r = 0; r < 2; r++) {
                memcpy(sum[r], &tile->out[first + r][i * LANES], sizeof sum[r]);
            }
            for (ptrdiff_t j = 0; j < keys; j++) {
                const char *row = tile->value_rows[tile->block][j] + head * tile->value_step[tile->block][j];
                Vector value[4];
                load_pair(&value[0], &value[1], row, i * LANES, bfloat16);
                load_pair(&value[2], &value[3], row, (i + 2) * LANES, bfloat16);
                for (int r = 0; r < 2; r++) {
                    float weight = tile->scores[first + r][j];
                    for (int n = 0; n < 4; n++) {
                        sum[r][n] += weight * value[n];
                    }
                }
            }
            for (int r = 0; r < 2; r++) {
                memcpy(&tile->out[first + r][i * LANES], sum[r], sizeof sum[r]);
            }
        }
    }
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
    ptrdiff_t head = layer->head_size * (ptrdiff_t)value_size(layer), bytes = heads * head;
    int next = !tile->block;
    for (ptrdiff_t j = 0; j < KEYS && cursor->position < end; j++) {
        bool is_new = cursor->position >= sequence->past;
        tile->key_step[next][j] = is_new ? layer->k_head * (ptrdiff_t)value_size(layer) : head;
        tile->value_step[next][j] = is_new ? layer->v_head * (ptrdiff_t)value_size(layer) : head;
        next_row(layer, sequence, kv_head, cursor, &tile->key_rows[next][j], &tile->value_rows[next][j]);
        for (ptrdiff_t at = 0; at < bytes; at += 64) {
            /* To L2: it waits for more lines at a time than L1, whose waits would stop this loop. */
            __builtin_prefetch(tile->key_rows[next][j] + at, 0, 2);
            __builtin_prefetch(tile->value_rows[next][j] + at, 0, 2);
        }
    }
}

/* Take the keys from `begin` on into account. */
INLINE void
add_keys(const Layer *layer, Tile *tile, ptrdiff_t rows, ptrdiff_t begin, ptrdiff_t keys, bool masked)
{
    ptrdiff_t size = layer->head_size, vectors = (size + LANES - 1) / LANES;
    for (ptrdiff_t j = 0; j < keys; j++) {
        read_row(tile->keys[j], tile->key_rows[tile->block][j], size, layer->bfloat16, 1.0f);
        read_row(tile->values[j], tile->value_rows[tile->block][j], size, layer->bfloat16, 1.0f);
    }
    score_many(tile, rows, size);
    mask(layer, tile, 0, rows, begin, keys, masked);
    for (ptrdiff_t r = 0; r < rows; r++) {
        weigh(tile, r, vectors);
    }
    add_values(tile, rows, vectors, keys);
}

INLINE void
write_out(const Layer *layer, Tile *tile, ptrdiff_t row, ptrdiff_t token, ptrdiff_t head)
{
    for (ptrdiff_t d = 0; d < layer->head_size; d++) {
        tile->out[row][d] /= tile->total[row];
    }
    ptrdiff_t at = (token * layer->heads + head) * layer->head_size * (ptrdiff_t)value_size(layer);
    write_row(layer->out + at, tile->out[row], layer->head_size, layer->bfloat16);
}

INLINE const char *
query_of(const Layer *layer, ptrdiff_t token, ptrdiff_t head)
{
    return layer->q + (token * layer->q_token + head * layer->q_head) * (ptrdiff_t)value_size(layer);
}

/* One new token with few heads for each key-value head: its time is that of reading the cache, which goes token by
 * token through all heads. */
INLINE void
attend_one(const Layer *layer, const Sequence *sequence, Tile *tile, bool bfloat16)
{
    ptrdiff_t group = layer->heads / layer->kv_heads, vectors = layer->head_size / LANES;
    /* Rows are computed 2 at a time. */
    ptrdiff_t step = group + group % 2, most = ROWS / step, to = sequence->past + 1;
    ptrdiff_t first = layer->window > 0 && to > layer->window ? to - layer->window : 0;
    for (ptrdiff_t begun = 0; begun < layer->kv_heads; begun += most) {
        ptrdiff_t heads = layer->kv_heads - begun < most ? layer->kv_heads - begun : most;
        for (ptrdiff_t h = 0; h < heads; h++) {
            for (ptrdiff_t g = 0; g < step; g++) {
                ptrdiff_t head = (begun + h) * group + (g < group ? g : 0);
                start_row(layer, tile, h * step + g, head, query_of(layer, sequence->first, head), to - 1);
                if (bfloat16) {
                    reorder(tile->q[h * step + g], layer->head_size, false);
                }
            }
        }
        Cursor cursor = cursor_at(layer, first);
        tile->block = 0;
        find_rows(layer, sequence, begun, heads, &cursor, to, tile);
        for (ptrdiff_t key = first; key < to; key += KEYS) {
            ptrdiff_t keys = to - key < KEYS ? to - key : KEYS;
            tile->block = !tile->block;
            find_rows(layer, sequence, begun, heads, &cursor, to, tile);
            for (ptrdiff_t h = 0; h < heads; h++) {
                ptrdiff_t begin = h * step, end = begin + step;
                score_few(tile, begin, end, vectors, keys, h, bfloat16);
                mask(layer, tile, begin, end, key, keys, keys < KEYS);
                for (ptrdiff_t r = begin; r < end; r++) {
                    weigh(tile, r, vectors);
                }
                add_few(tile, begin, end, vectors, keys, h, bfloat16);
            }
        }
        for (ptrdiff_t h = 0; h < heads; h++) {
            for (ptrdiff_t g = 0; g < group; g++) {
                if (bfloat16) {
                    reorder(tile->out[h * step + g], layer->head_size, true);
                }
                write_out(layer, tile, h * step + g, sequence->first, (begun + h) * group + g);
            }
        }
    }
}

/* Many rows: the time is that of the products. */
INLINE void
attend_many(const Layer *layer, const Sequence *sequence, ptrdiff_t kv_head, Tile *tile)
{
    ptrdiff_t group = layer->heads / layer->kv_heads, tokens = ROWS / group > 0 ? ROWS / group : 1;
    /* More heads than rows are computed in several turns. */
    ptrdiff_t heads = group < ROWS ? group : ROWS;
    for (ptrdiff_t begun = 0; begun < sequence->count; begun += tokens) {
        ptrdiff_t count = sequence->count - begun < tokens ? sequence->count - begun : tokens;
        ptrdiff_t from = sequence->past + begun, to = from + count, token = sequence->first + begun;
        ptrdiff_t first = layer->window > 0 && from >= layer->window ? from - layer->window + 1 : 0;
        for (ptrdiff_t turn = 0; turn < group; turn += heads) {
            ptrdiff_t here = group - turn < heads ? group - turn : heads, rows = count * here;
            for (ptrdiff_t r = 0; r < rows; r++) {
                ptrdiff_t head = kv_head * group + turn + r % here;
                start_row(layer, tile, r, head, query_of(layer, token + r / here, head), from + r / here);
            }
            Cursor cursor = cursor_at(layer, first);
            tile->block = 0;
            find_rows(layer, sequence, kv_head, 1, &cursor, to, tile);
            for (ptrdiff_t key = first; key < to; key += KEYS) {
                ptrdiff_t keys = to - key < KEYS ? to - key : KEYS;
                tile->block = !tile->block;
                find_rows(layer, sequence, kv_head, 1, &cursor, to, tile);
                bool masked = keys < KEYS || key + keys > from + 1 || (layer->window > 0 && key < to - layer->window);
                add_keys(layer, tile, rows, key, keys, masked);
            }
            for (ptrdiff_t r = 0; r < rows; r++) {
                write_out(layer, tile, r, token + r / here, kv_head * group + turn + r % here);
            }
        }
    }
}

FOR_EACH_CPU void
attend(const Layer *layer, const Sequence *sequence)
{
    Tile tile;
    bool few = layer->heads / layer->kv_heads <= FEW_ROWS && layer->head_size % (4 * LANES) == 0;
    if (sequence->count == 1 && few && layer->bfloat16) {
        attend_one(layer, sequence, &tile, true);
    }
    else if (sequence->count == 1 && few) {
        attend_one(layer, sequence, &tile, false);
    }
    else {
        /* Vectors are added 4 at a time. */
        memset(tile.values, 0, sizeof tile.values);
        for (ptrdiff_t head = 0; head < layer->kv_heads; head++) {
            attend_many(layer, sequence, head, &tile);
        }
    }
    for (ptrdiff_t head = 0; head < layer->kv_heads; head++) {
        write_new(layer, sequence, head);
    }
}
