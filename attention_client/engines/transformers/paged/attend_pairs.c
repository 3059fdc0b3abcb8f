#include "tile.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

INLINE TARGET void
begin_row(const Layer *layer, Tile *tile, ptrdiff_t row, const char *q)
{
    memcpy(tile->q_pairs[row], q, (size_t)layer->head_size * 2);
}

/* Transpose 16 x 16 values of 32 bits. */
INLINE TARGET void
transpose(__m512i *r)
{
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* Keys as pairs of values of the head, by pair and key; values as pairs of keys. */
INLINE TARGET void
read_block(const Layer *layer, Tile *tile, ptrdiff_t keys, uint32_t (*key_pairs)[KEYS], uint32_t (*value_pairs)[MOST_HEAD_SIZE])
{
    ptrdiff_t size = layer->head_size;
    const char *const *key_rows = tile->key_rows[tile->block], *const *value_rows = tile->value_rows[tile->block];
    for (ptrdiff_t first = 0; first < KEYS; first += 16) {
        for (ptrdiff_t at = 0; at < size / 2; at += 16) {
            __m512i r[16];
            for (ptrdiff_t i = 0; i < 16; i++) {
                r[i] = first + i < keys ? _mm512_loadu_si512(key_rows[first + i] + at * 4) : _mm512_setzero_si512();
            }
            transpose(r);
            for (ptrdiff_t i = 0; i < 16; i++) {
                _mm512_storeu_si512(&key_pairs[at + i][first], r[i]);
            }
        }
    }
    for (ptrdiff_t j = 0; j < keys; j += 2) {
        for (ptrdiff_t d = 0; d < size; d += 16) {
            __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(value_rows[j] + d * 2)));
            __m512i odd = j + 1 < keys
                              ? _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(value_rows[j + 1] + d * 2)))
                              : _mm512_setzero_si512();
            _mm512_storeu_si512(&value_pairs[j / 2][d], _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
        }
    }
}

INLINE TARGET __m512bh
pair(uint32_t value)
{
    return (__m512bh)_mm512_set1_epi32((int)value);
}

/* 8 rows at a time; rows beyond the last are computed in vain. */
INLINE TARGET void
score_pairs(Tile *tile, ptrdiff_t rows, ptrdiff_t pairs, uint32_t (*key_pairs)[KEYS], float scale)
{
    for (ptrdiff_t r = 0; r < rows; r += 8) {
        __m512 sum[8][2];
        for (int i = 0; i < 8; i++) {
            sum[i][0] = sum[i][1] = _mm512_setzero_ps();
        }
        for (ptrdiff_t d = 0; d < pairs; d++) {
            __m512bh low = (__m512bh)_mm512_loadu_si512(&key_pairs[d][0]);
            __m512bh high = (__m512bh)_mm512_loadu_si512(&key_pairs[d][16]);
            for (int i = 0; i < 8; i++) {
                __m512bh q = pair(tile->q_pairs[r + i][d]);
                sum[i][0] = _mm512_dpbf16_ps(sum[i][0], q, low);
                sum[i][1] = _mm512_dpbf16_ps(sum[i][1], q, high);
            }
        }
        for (int i = 0; i < 8; i++) {
            _mm512_storeu_ps(&tile->scores[r + i][0], _mm512_mul_ps(sum[i][0], _mm512_set1_ps(scale)));
            _mm512_storeu_ps(&tile->scores[r + i][16], _mm512_mul_ps(sum[i][1], _mm512_set1_ps(scale)));
        }
    }
}

/* 4 rows by 64 values at a time. */
INLINE TARGET void
add_pairs(Tile *tile, ptrdiff_t rows, ptrdiff_t size, ptrdiff_t keys, uint32_t (*value_pairs)[MOST_HEAD_SIZE])
{
    for (ptrdiff_t r = 0; r < rows; r += 4) {
        for (ptrdiff_t d = 0; d < size; d += 64) {
            __m512 sum[4][4];
            for (int i = 0; i < 4; i++) {
                for (int n = 0; n < 4; n++) {
                    sum[i][n] = _mm512_loadu_ps(&tile->out[r + i][d + n * 16]);
                }
            }
            for (ptrdiff_t j = 0; j < (keys + 1) / 2; j++) {
                __m512bh value[4];
                for (int n = 0; n < 4; n++) {
                    value[n] = (__m512bh)_mm512_loadu_si512(&value_pairs[j][d + n * 16]);
                }
                for (int i = 0; i < 4; i++) {
                    __m512bh weight = pair(tile->weight_pairs[r + i][j]);
                    for (int n = 0; n < 4; n++) {
                        sum[i][n] = _mm512_dpbf16_ps(sum[i][n], weight, value[n]);
                    }
                }
            }
            for (int i = 0; i < 4; i++) {
                for (int n = 0; n < 4; n++) {
                    _mm512_storeu_ps(&tile->out[r + i][d + n * 16], sum[i][n]);
                }
            }
        }
    }
}

INLINE TARGET void
add_keys(const Layer *layer, Tile *tile, ptrdiff_t rows, ptrdiff_t begin, ptrdiff_t keys, bool masked)
{
    ptrdiff_t size = layer->head_size;
    uint32_t(*key_pairs)[KEYS] = (uint32_t(*)[KEYS])tile->transposed;
    uint32_t(*value_pairs)[MOST_HEAD_SIZE] = (uint32_t(*)[MOST_HEAD_SIZE])tile->values;
    read_block(layer, tile, keys, key_pairs, value_pairs);
    score_pairs(tile, rows, size / 2, key_pairs, layer->scale);
    mask(layer, tile, 0, rows, begin, keys, masked);
    for (ptrdiff_t r = 0; r < rows; r++) {
        weigh(tile, r, size / LANES);
        __m512 low = _mm512_loadu_ps(&tile->scores[r][0]), high = _mm512_loadu_ps(&tile->scores[r][16]);
        _mm512_storeu_si512(tile->weight_pairs[r], (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
    add_pairs(tile, rows, size, keys, value_pairs);
}

#include "many.h"

static TARGET void
attend_heads(const Layer *layer, const Sequence *sequence)
{
    Tile tile;
    /* Rows beyond the last one are computed, too. */
    memset(tile.q_pairs, 0, sizeof tile.q_pairs);
    memset(tile.weight_pairs, 0, sizeof tile.weight_pairs);
    memset(tile.out, 0, sizeof tile.out);
    for (ptrdiff_t head = 0; head < layer->kv_heads; head++) {
        attend_many(layer, sequence, head, &tile);
    }
}

bool
attend_many_pairs(const Layer *layer, const Sequence *sequence)
{
    if (!layer->bfloat16 || layer->head_size % 64 != 0 || !__builtin_cpu_supports("avx512bf16") ||
        !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl")) {
        return false;
    }
    attend_heads(layer, sequence);
    return true;
}

#else

bool
attend_many_pairs(const Layer *layer, const Sequence *sequence)
{
    (void)layer, (void)sequence;
    return false;
}

#endif
