/* Queries, keys and values as the tiles of attend_tiles.c, and its sums as rows. */
#include "tile.h"

#include <immintrin.h>

#define SIDE 16  /* Rows of a tile, and words of a row. */
#define DEPTH 32 /* Values of bfloat16 in a row. */
#define TILE_BYTES 1024
#define TALLEST (MOST_HEAD_SIZE / SIDE)
#define DEEPEST (MOST_HEAD_SIZE / DEPTH)
#define BLOCK_KEYS 128
#define STEPS (BLOCK_KEYS / DEPTH)
#define COLUMNS (LARGE_TASK_ROWS / SIDE) /* Tiles of rows. */
#define AHEAD 16                         /* Keys that are prefetched. */
#define LOG2_E 1.44269504f

typedef struct {
    char q[COLUMNS * DEEPEST][TILE_BYTES], keys[BLOCK_KEYS / SIDE * DEEPEST][TILE_BYTES];
    char values[TALLEST * STEPS][TILE_BYTES], weights[2][2 * STEPS][TILE_BYTES];
    float scores[2][2][BLOCK_KEYS][SIDE], out[COLUMNS * TALLEST][SIDE][SIDE];
    /* Of a row: the largest score, as a power of 2, and the sum of weights. */
    float largest[COLUMNS][SIDE], total[COLUMNS][SIDE];
    int32_t position[COLUMNS][SIDE];
    const char *key_rows[BLOCK_KEYS], *value_rows[BLOCK_KEYS];
    /* Tiles of a head's size along k, and of the values' along m. */
    ptrdiff_t deep, tall;
} __attribute__((aligned(64))) Tiles;

/* Read values `at` to `at + DEPTH` of a row of `size`; what is beyond it is 0. */
INLINE __m512i
read_part(const char *row, ptrdiff_t at, ptrdiff_t size)
{
    __mmask32 there = size - at >= DEPTH ? 0xffffffffu : 0xffffu;
    return _mm512_maskz_loadu_epi16(there, row + at * 2);
}

/* Copy the keys of a block to tiles. */
INLINE void
read_keys(const Layer *layer, Tiles *tiles, ptrdiff_t keys)
{
    for (ptrdiff_t j = 0; j < keys; j++) {
        if (j + AHEAD < keys) {
            for (ptrdiff_t d = 0; d < layer->head_size; d += DEPTH) {
                _mm_prefetch(tiles->key_rows[j + AHEAD] + d * 2, _MM_HINT_T0);
            }
            for (ptrdiff_t d = 0; d < layer->v_size; d += DEPTH) {
                _mm_prefetch(tiles->value_rows[j + AHEAD] + d * 2, _MM_HINT_T0);
            }
        }
        for (ptrdiff_t part = 0; part < tiles->deep; part++) {
            char *tile = tiles->keys[j / SIDE * tiles->deep + part];
            _mm512_store_si512(tile + j % SIDE * 64, read_part(tiles->key_rows[j], part * DEPTH, layer->head_size));
        }
    }
}

/* Load 8 values of each of 4 rows, 8 rows apart. */
INLINE __m512i
load_parts(const char *const *rows, ptrdiff_t d)
{
    __m512i part = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(rows[0] + d * 2)));
    part = _mm512_inserti32x4(part, _mm_loadu_si128((const __m128i *)(rows[8] + d * 2)), 1);
    part = _mm512_inserti32x4(part, _mm_loadu_si128((const __m128i *)(rows[16] + d * 2)), 2);
    return _mm512_inserti32x4(part, _mm_loadu_si128((const __m128i *)(rows[24] + d * 2)), 3);
}

/* Transpose the values of a block: a tile has 16 values of 32 keys. */
INLINE void
read_values(const Layer *layer, Tiles *tiles, ptrdiff_t keys)
{
    for (ptrdiff_t j = 0; j < keys; j += DEPTH) {
        const char *const *rows = tiles->value_rows + j;
        for (ptrdiff_t d = 0; d < layer->v_size; d += 8) {
            char *tile = tiles->values[d / SIDE * STEPS + j / DEPTH] + d % SIDE * 64;
            __m512i low[4], high[4];
            for (int i = 0; i < 4; i++) {
                __m512i even = load_parts(rows + 2 * i, d), odd = load_parts(rows + 2 * i + 1, d);
                low[i] = _mm512_unpacklo_epi16(even, odd);
                high[i] = _mm512_unpackhi_epi16(even, odd);
            }
            transpose_lanes(low);
            transpose_lanes(high);
            memcpy(tile, low, sizeof low);
            memcpy(tile + sizeof low, high, sizeof high);
        }
    }
}

/* Read the keys `first` to `end` of a block, with zeros around them up to whole steps. Returns where the steps end. */
INLINE ptrdiff_t
read_block(const Layer *layer, const Sequence *sequence, ptrdiff_t kv_head, Cursor *at, ptrdiff_t first, ptrdiff_t end,
           Tiles *tiles)
{
    static const char none[MOST_HEAD_SIZE * 2];
    ptrdiff_t keys = (end + DEPTH - 1) / DEPTH * DEPTH;
    for (ptrdiff_t j = 0; j < keys; j++) {
        tiles->key_rows[j] = tiles->value_rows[j] = none;
        if (j >= first && j < end) {
            next_row(layer, sequence, kv_head, at, &tiles->key_rows[j], &tiles->value_rows[j]);
        }
    }
    read_keys(layer, tiles, keys);
    read_values(layer, tiles, keys);
    return keys;
}

/* Begin the rows of `heads` heads from `head` on, of `count` tokens from `token` on, the first of which has
 * `position`. Those that fill the last tile repeat the last row. */
INLINE void
begin_rows(const Layer *layer, Tiles *tiles, ptrdiff_t token, ptrdiff_t position, ptrdiff_t count, ptrdiff_t head,
           ptrdiff_t heads)
{
    ptrdiff_t t = 0, h = 0;
    for (ptrdiff_t column = 0; column * SIDE < count * heads; column++) {
        const char *q[SIDE];
        for (int lane = 0; lane < SIDE; lane++) {
            q[lane] = query_of(layer, token + t, head + h);
            tiles->position[column][lane] = (int32_t)(position + t);
            tiles->largest[column][lane] = layer->sinks == NULL ? -INFINITY : layer->sinks[head + h] * LOG2_E;
            tiles->total[column][lane] = layer->sinks == NULL ? 0.0f : 1.0f;
            if (h + 1 < heads) {
                h++;
            }
            else if (t + 1 < count) {
                t++;
                h = 0;
            }
        }
        for (ptrdiff_t part = 0; part < tiles->deep; part++) {
            __m512i words[SIDE];
            for (int lane = 0; lane < SIDE; lane++) {
                words[lane] = read_part(q[lane], part * DEPTH, layer->head_size);
            }
            transpose_words(words);
            memcpy(tiles->q[column * tiles->deep + part], words, sizeof words);
        }
        memset(tiles->out[column * tiles->tall], 0, (size_t)tiles->tall * TILE_BYTES);
    }
}

INLINE void
end_rows(const Layer *layer, Tiles *tiles, ptrdiff_t token, ptrdiff_t count, ptrdiff_t head, ptrdiff_t heads)
{
    ptrdiff_t t = 0, h = 0;
    for (ptrdiff_t column = 0; column * SIDE < count * heads; column++) {
        __m512 factor = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_load_ps(tiles->total[column]));
        char *to[SIDE];
        ptrdiff_t lanes = 0;
        for (; lanes < SIDE && t < count; lanes++) {
            to[lanes] = out_of(layer, token + t, head + h);
            h = h + 1 < heads ? h + 1 : 0;
            t += h == 0;
        }
        for (ptrdiff_t m = 0; m < tiles->tall; m++) {
            __m512i values[SIDE];
            for (int i = 0; i < SIDE; i++) {
                values[i] = (__m512i)_mm512_mul_ps(_mm512_load_ps(tiles->out[column * tiles->tall + m][i]), factor);
            }
            transpose_words(values);
            for (ptrdiff_t lane = 0; lane < lanes; lane++) {
                _mm256_storeu_si256((__m256i *)(to[lane] + m * SIDE * 2), (__m256i)_mm512_cvtneps_pbh((__m512)values[lane]));
            }
        }
    }
}
