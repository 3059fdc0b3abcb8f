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
    const char *const *key_rows = tile->key_rows[tile->block], *const *value_rows = tile->value_rows[tile->block];
    for (ptrdiff_t first = 0; first < KEYS; first += 16) {
        for (ptrdiff_t at = 0; at < layer->head_size / 2; at += 16) {
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
        for (ptrdiff_t d = 0; d < layer->v_size; d += 16) {
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

INLINE TARGET void
write_weights(Tile *tile, ptrdiff_t row)
{
    __m512 low = _mm512_loadu_ps(&tile->scores[row][0]), high = _mm512_loadu_ps(&tile->scores[row][16]);
    _mm512_storeu_si512(tile->weight_pairs[row], (__m512i)_mm512_cvtne2ps_pbh(high, low));
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
    uint32_t(*key_pairs)[KEYS] = (uint32_t(*)[KEYS])tile->transposed;
    uint32_t(*value_pairs)[MOST_HEAD_SIZE] = (uint32_t(*)[MOST_HEAD_SIZE])tile->values;
    read_block(layer, tile, keys, key_pairs, value_pairs);
    score_pairs(tile, rows, layer->head_size / 2, key_pairs, layer->scale);
    mask(layer, tile, 0, rows, begin, keys, masked);
    for (ptrdiff_t r = 0; r < rows; r++) {
        weigh(tile, r, layer->v_size / LANES);
        write_weights(tile, r);
    }
    add_pairs(tile, rows, layer->v_size, keys, value_pairs);
}

#include "many.h"

/* ---- one token ---------------------------------------------------------------------------------------------- */

INLINE TARGET void
begin_one(const Layer *layer, Tile *tile, ptrdiff_t row, const char *q, bool bfloat16)
{
    (void)bfloat16;
    begin_row(layer, tile, row, q);
}

/* Sum each of 16 vectors. */
INLINE TARGET __m512
sums_of(__m512 *v)
{
    for (int i = 0; i < 8; i++) {
        v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    }
    for (int i = 0; i < 4; i++) {
        __m512d a = _mm512_castps_pd(v[2 * i]), b = _mm512_castps_pd(v[2 * i + 1]);
        v[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int i = 0; i < 2; i++) {
        __m512 a = v[2 * i], b = v[2 * i + 1];
        v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    return _mm512_add_ps(_mm512_shuffle_f32x4(v[0], v[1], 0x88), _mm512_shuffle_f32x4(v[0], v[1], 0xdd));
}

/* Scores of one row with 16 keys at a time. Those beyond the last key are masked later. */
INLINE TARGET void
score_one(Tile *tile, ptrdiff_t row, ptrdiff_t size, ptrdiff_t keys, ptrdiff_t head, float scale)
{
    const char *const *rows = tile->key_rows[tile->block];
    const ptrdiff_t *step = tile->key_step[tile->block];
    const char *q = (const char *)tile->q_pairs[row];
    for (ptrdiff_t first = 0; first < keys; first += 16) {
        __m512 sum[16];
        for (ptrdiff_t i = 0; i < 16; i++) {
            ptrdiff_t j = first + i < keys ? first + i : 0;
            const char *key = rows[j] + head * step[j];
            sum[i] = _mm512_setzero_ps();
            for (ptrdiff_t at = 0; at < size * 2; at += 64) {
                sum[i] = _mm512_dpbf16_ps(sum[i], (__m512bh)_mm512_loadu_si512(q + at), (__m512bh)_mm512_loadu_si512(key + at));
            }
        }
        _mm512_storeu_ps(&tile->scores[row][first], _mm512_mul_ps(sums_of(sum), _mm512_set1_ps(scale)));
    }
}

/* Add 64 weighted values of two keys to two rows. Pairs of values come in the order of the instruction: 4 of the first
 * half of each 8, then 4 of the second. */
INLINE TARGET void
add_two(Tile *tile, ptrdiff_t row, ptrdiff_t pair_of_keys, __m512 (*sum)[4], const char *even, const char *odd)
{
    __m512i value[4];
    for (int n = 0; n < 2; n++) {
        __m512i a = _mm512_loadu_si512(even + n * 64);
        __m512i b = odd != NULL ? _mm512_loadu_si512(odd + n * 64) : _mm512_setzero_si512();
        value[2 * n] = _mm512_unpacklo_epi16(a, b);
        value[2 * n + 1] = _mm512_unpackhi_epi16(a, b);
    }
    for (int r = 0; r < 2; r++) {
        __m512bh weight = pair(tile->weight_pairs[row + r][pair_of_keys]);
        for (int n = 0; n < 4; n++) {
            sum[r][n] = _mm512_dpbf16_ps(sum[r][n], weight, (__m512bh)value[n]);
        }
    }
}

INLINE TARGET void
add_values_of_one(Tile *tile, ptrdiff_t row, ptrdiff_t size, ptrdiff_t keys, ptrdiff_t head)
{
    const char *const *rows = tile->value_rows[tile->block];
    const ptrdiff_t *step = tile->value_step[tile->block];
    for (ptrdiff_t d = 0; d < size; d += 64) {
        __m512 sum[2][4];
        for (int i = 0; i < 8; i++) {
            sum[i / 4][i % 4] = _mm512_loadu_ps(&tile->out[row + i / 4][d + i % 4 * 16]);
        }
        ptrdiff_t j = 0;
        for (; j + 1 < keys; j += 2) {
            add_two(tile, row, j / 2, sum, rows[j] + head * step[j] + d * 2, rows[j + 1] + head * step[j + 1] + d * 2);
        }
        if (j < keys) {
            add_two(tile, row, j / 2, sum, rows[j] + head * step[j] + d * 2, NULL);
        }
        for (int i = 0; i < 8; i++) {
            _mm512_storeu_ps(&tile->out[row + i / 4][d + i % 4 * 16], sum[i / 4][i % 4]);
        }
    }
}

INLINE TARGET void
score_few_keys(const Layer *layer, Tile *tile, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t key, ptrdiff_t keys,
               ptrdiff_t head, bool bfloat16)
{
    (void)bfloat16;
    for (ptrdiff_t r = begin; r < end; r++) {
        score_one(tile, r, layer->head_size, keys, head, layer->scale);
    }
    mask(layer, tile, begin, end, key, keys, keys < KEYS);
    for (ptrdiff_t r = begin; r < end; r++) {
        weigh(tile, r, layer->v_size / LANES);
        write_weights(tile, r);
    }
}

INLINE TARGET void
add_few_values(const Layer *layer, Tile *tile, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t keys, ptrdiff_t head,
               bool bfloat16)
{
    (void)bfloat16;
    for (ptrdiff_t r = begin; r < end; r += 2) {
        add_values_of_one(tile, r, layer->v_size, keys, head);
    }
}

/* Put the sums in order: see `add_two`. */
INLINE TARGET void
end_one(const Layer *layer, Tile *tile, ptrdiff_t row, bool bfloat16)
{
    (void)bfloat16;
    float ordered[32];
    for (ptrdiff_t d = 0; d < layer->v_size; d += 32) {
        float *values = &tile->out[row][d];
        for (ptrdiff_t i = 0; i < 32; i += 4) {
            memcpy(ordered + i, values + i / 4 % 2 * 16 + i / 8 * 4, 4 * sizeof *values);
        }
        memcpy(values, ordered, sizeof ordered);
    }
}

#include "one.h"

static TARGET void
attend_token(const Layer *layer, const Sequence *sequence)
{
    Tile tile;
    attend_one(layer, sequence, &tile, true);
}

static TARGET void
attend_heads(const Layer *layer, const Sequence *sequence)
{
    Tile tile;
    /* Rows beyond the last one are computed, too. */
    for (ptrdiff_t r = 0; r < ROWS; r++) {
        memset(tile.q_pairs[r], 0, (size_t)layer->head_size * 2);
        memset(tile.out[r], 0, (size_t)layer->v_size * sizeof(float));
    }
    memset(tile.weight_pairs, 0, sizeof tile.weight_pairs);
    for (ptrdiff_t head = sequence->head; head < sequence->end_head; head++) {
        attend_many(layer, sequence, head, &tile);
    }
}

bool
attend_pairs(const Layer *layer, const Sequence *sequence, bool one)
{
    if (!layer->bfloat16 || layer->head_size % 64 != 0 || layer->v_size % 64 != 0 || !__builtin_cpu_supports("avx512bf16") ||
        !__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl")) {
        return false;
    }
    (one ? attend_token : attend_heads)(layer, sequence);
    return true;
}

#else

bool
attend_pairs(const Layer *layer, const Sequence *sequence, bool one)
{
    (void)layer, (void)sequence, (void)one;
    return false;
}

#endif
