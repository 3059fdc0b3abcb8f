#include "attend.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define VECTOR_BYTES 64
#define PAIRS
/* Products of pairs of bfloat16, and their sums. */
#define MULTIPLY_ADD(sum, a, b) \
    ((sum) = (Vector)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(b), (__m512bh)_mm512_set1_ps(a)))
#include "tile.h"

/* Two keys' weights as pairs, to the nearest bfloat16. */
INLINE void
pair_weights(float *to, const float *even, const float *odd)
{
    __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(even)));
    __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(odd)));
    _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

#include "many.h"
#include "one.h"

INLINE __m512bh
pair(uint32_t value)
{
    return (__m512bh)_mm512_set1_epi32((int)value);
}

INLINE void
write_weights(Tile *tile, ptrdiff_t row)
{
    __m512 low = _mm512_loadu_ps(&tile->scores[row][0]), high = _mm512_loadu_ps(&tile->scores[row][16]);
    _mm512_storeu_si512(tile->weight_pairs[row], (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

INLINE void
begin_one(const Layer *layer, Tile *tile, ptrdiff_t row, const char *q, Form form)
{
    (void)form;
    memcpy(tile->q_pairs[row], q, (size_t)layer->head_size * 2);
}

/* Sum each of 16 vectors. */
INLINE __m512
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
INLINE void
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
INLINE void
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

INLINE void
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

INLINE void
score_few_keys(const Layer *layer, Tile *tile, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t key, ptrdiff_t keys,
               ptrdiff_t head, Form form)
{
    (void)form;
    for (ptrdiff_t r = begin; r < end; r++) {
        score_one(tile, r, layer->head_size, keys, head, layer->scale);
    }
    mask(layer, tile, begin, end, key, keys, keys < KEYS);
    for (ptrdiff_t r = begin; r < end; r++) {
        weigh(tile, r, layer->v_size / LANES);
        write_weights(tile, r);
    }
}

INLINE void
add_few_values(const Layer *layer, Tile *tile, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t keys, ptrdiff_t head,
               Form form)
{
    (void)form;
    for (ptrdiff_t r = begin; r < end; r += 2) {
        add_values_of_one(tile, r, layer->v_size, keys, head);
    }
}

/* Put the sums in order: see `add_two`. */
INLINE void
end_one(const Layer *layer, Tile *tile, ptrdiff_t row, Form form)
{
    (void)form;
    float ordered[32];
    for (ptrdiff_t d = 0; d < layer->v_size; d += 32) {
        float *values = &tile->out[row][d];
        for (ptrdiff_t i = 0; i < 32; i += 4) {
            memcpy(ordered + i, values + i / 4 % 2 * 16 + i / 8 * 4, 4 * sizeof *values);
        }
        memcpy(values, ordered, sizeof ordered);
    }
}

static TARGET void
attend_token(const Layer *layer, const Sequence *sequence)
{
    Tile tile;
    attend_one(layer, sequence, &tile, IN_BFLOAT16);
}

bool
attend_pairs(const Layer *layer, const Sequence *sequence)
{
    bool one = is_one(layer, sequence), whole = layer->head_size % 64 == 0 && layer->v_size % 64 == 0;
    if (!layer->bfloat16 || (one && !whole) || !__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl")) {
        return false;
    }
    (one ? attend_token : attend_heads)(layer, sequence);
    return true;
}

#endif
