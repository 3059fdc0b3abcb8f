/* Many rows of bfloat16 in tiles of Intel AMX: flash-attention as in many.h, with 16 rows to a tile.
 *
 * All operands are tiles of 1 KiB, and both products are of the same kind, c[m][row] += a[m][k] * b[k][row]:
 *
 *     scores[key][row] = keys[key][d] * q[d][row]           out[d][row] += values[d][key] * weights[key][row]
 *
 * A tile of b has pairs along k in a word, so queries are transposed in words once for a task, and two keys'
 * scores become pairs of weights. A tile of a has plain rows: keys are copied, values are transposed once for
 * all rows of a task. A block begins at a multiple of BLOCK_KEYS of the sequence's own positions, and a hidden
 * key adds 0, so a row's sums have an order that nothing else in the pass can change. */
#include "attend.h"

#if defined(__x86_64__)

#include "../../../../eaas/threads/amx.h"

#define TARGET __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512bf16")))
#define VECTOR_BYTES 64
#include "amx_tiles.h"

#define SLACK 11.5f /* As in many.h, in powers of 2. */

/* One or two tiles of rows, and the keys of the block that they see. */
typedef struct {
    ptrdiff_t column, low, high;
    int wide, buffer; /* the place of scores and weights */
} Panel;

/* ---- products ---------------------------------------------------------------------------------------------- */

/* Add products of `steps` tiles to 1 or 2 by 1 or 2 sums, constants where this is inlined; the second ones are
 * so many bytes beyond the first. */
INLINE void
multiply(const int tall, const int wide, const char *a, ptrdiff_t next_a, const char *b, ptrdiff_t next_b, ptrdiff_t steps,
         char *c, ptrdiff_t next_m, ptrdiff_t next_n, bool add)
{
/* Tile numbers must be literals. */
#define BEGIN(tile, at)            \
    if (add) {                     \
        _tile_loadd(tile, at, 64); \
    }                              \
    else {                         \
        _tile_zero(tile);          \
    }
    BEGIN(0, c);
    if (wide > 1) {
        BEGIN(1, c + next_n);
    }
    if (tall > 1) {
        BEGIN(2, c + next_m);
    }
    if (tall > 1 && wide > 1) {
        BEGIN(3, c + next_m + next_n);
    }
    for (ptrdiff_t step = 0; step < steps; step++, a += TILE_BYTES, b += TILE_BYTES) {
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (wide > 1) {
            _tile_loadd(7, b + next_b, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (tall > 1) {
            _tile_loadd(5, a + next_a, 64);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (tall > 1 && wide > 1) {
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, 64);
    if (wide > 1) {
        _tile_stored(1, c + next_n, 64);
    }
    if (tall > 1) {
        _tile_stored(2, c + next_m, 64);
    }
    if (tall > 1 && wide > 1) {
        _tile_stored(3, c + next_m + next_n, 64);
    }
#undef BEGIN
}

/* Compute the scores of a step of keys. */
INLINE void
score(Tiles *tiles, const Panel *panel, ptrdiff_t step)
{
    ptrdiff_t row = tiles->deep * TILE_BYTES, j = step * DEPTH;
    const char *keys = tiles->keys[j / SIDE * tiles->deep], *q = tiles->q[panel->column * tiles->deep];
    char *scores = (char *)tiles->scores[panel->buffer][0][j];
    if (j < panel->low || j >= panel->high) {
        return;
    }
    if (panel->wide == 2) {
        multiply(2, 2, keys, row, q, row, tiles->deep, scores, TILE_BYTES, sizeof tiles->scores[0][0], false);
    }
    else {
        multiply(2, 1, keys, row, q, row, tiles->deep, scores, TILE_BYTES, 0, false);
    }
}

/* Add the weighted values of all steps to a share of the sums. */
INLINE void
add_values(Tiles *tiles, const Panel *panel, ptrdiff_t share)
{
    ptrdiff_t first = panel->low / DEPTH, steps = (panel->high - panel->low) / DEPTH, row = STEPS * TILE_BYTES;
    ptrdiff_t pairs = (tiles->tall + 1) / 2, next = tiles->tall * TILE_BYTES;
    const char *weights = tiles->weights[panel->buffer][first];
    for (ptrdiff_t m = pairs * share / STEPS * 2; m < pairs * (share + 1) / STEPS * 2; m += 2) {
        const char *values = tiles->values[m * STEPS + first];
        char *out = (char *)tiles->out[panel->column * tiles->tall + m];
        bool is_last = m + 1 == tiles->tall;
        if (panel->wide == 2 && !is_last) {
            multiply(2, 2, values, row, weights, row, steps, out, TILE_BYTES, next, true);
        }
        else if (panel->wide == 2) {
            multiply(1, 2, values, row, weights, row, steps, out, TILE_BYTES, next, true);
        }
        else if (!is_last) {
            multiply(2, 1, values, row, weights, row, steps, out, TILE_BYTES, next, true);
        }
        else {
            multiply(1, 1, values, row, weights, row, steps, out, TILE_BYTES, next, true);
        }
    }
}

/* ---- softmax ----------------------------------------------------------------------------------------------- */

/* 2^x for x up to SLACK, to about 4e-6: weights become bfloat16. What is smaller than the smallest normal number
 * is 0; NaN stays. */
INLINE __m512
power_of_2(__m512 x)
{
    const __m512 rounds = _mm512_set1_ps(12582912.0f); /* to a whole number: 1.5 * 2^23 */
    __m512 shifted = _mm512_add_ps(x, rounds), f = _mm512_sub_ps(x, _mm512_sub_ps(shifted, rounds));
    __m512 p = _mm512_set1_ps(9.6181291e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5504109e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022651e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314718e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLE_UQ);
    __m512i power = _mm512_slli_epi32((__m512i)shifted, 23);
    return (__m512)_mm512_maskz_add_epi32(counts, (__m512i)p, power);
}

/* Scale scores, and bound them by tanh: (1 - e) / (1 + e) with e = exp(-2 |x|), and the sign of x. */
INLINE void
bound(const Layer *layer, float (*scores)[SIDE])
{
    const __m512 factor = _mm512_set1_ps(-2 * LOG2_E * layer->scale / layer->softcap), one = _mm512_set1_ps(1.0f);
    const __m512i sign = _mm512_set1_epi32(INT32_MIN);
    for (int i = 0; i < SIDE; i++) {
        __m512 score = _mm512_load_ps(scores[i]), e = power_of_2(_mm512_mul_ps(_mm512_abs_ps(score), factor));
        __m512 size = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e)) * layer->softcap;
        _mm512_store_si512(scores[i], _mm512_or_si512((__m512i)size, _mm512_and_si512((__m512i)score, sign)));
    }
}

/* Hide those of 16 keys from `key` on that a row does not see. */
INLINE void
hide(const Layer *layer, float (*scores)[SIDE], ptrdiff_t key, __m512i position)
{
    __m512i window = _mm512_set1_epi32(layer->window > 0 ? (int32_t)layer->window : INT32_MAX);
    for (int i = 0; i < SIDE; i++) {
        __m512i distance = _mm512_sub_epi32(position, _mm512_set1_epi32((int32_t)(key + i)));
        __mmask16 seen = _mm512_cmpge_epi32_mask(distance, _mm512_setzero_si512());
        seen = _mm512_mask_cmplt_epi32_mask(seen, distance, window);
        _mm512_store_ps(scores[i], _mm512_mask_blend_ps(seen, _mm512_set1_ps(-INFINITY), _mm512_load_ps(scores[i])));
    }
}

/* Return the largest score of each row. */
INLINE __m512
largest_scores(const Layer *layer, float (*scores)[SIDE], ptrdiff_t begin, ptrdiff_t low, ptrdiff_t high,
               const int32_t *position)
{
    ptrdiff_t least = position[0], most = position[SIDE - 1];
    __m512 top[4];
    for (int i = 0; i < 4; i++) {
        top[i] = _mm512_set1_ps(-INFINITY);
    }
    for (ptrdiff_t j = low; j < high; j += SIDE) {
        if (layer->softcap > 0) {
            bound(layer, scores + j);
        }
        if (begin + j + SIDE - 1 > least || (layer->window > 0 && begin + j <= most - layer->window)) {
            hide(layer, scores + j, begin + j, _mm512_load_si512(position));
        }
        for (int i = 0; i < SIDE; i++) {
            top[i % 4] = _mm512_max_ps(_mm512_load_ps(scores[j + i]), top[i % 4]);
        }
    }
    return _mm512_max_ps(_mm512_max_ps(top[0], top[1]), _mm512_max_ps(top[2], top[3]));
}

/* Let `top` be the largest power of the rows where it is much larger, and scale what was summed before. */
INLINE void
rescale(Tiles *tiles, ptrdiff_t column, __m512 top)
{
    __m512 largest = _mm512_load_ps(tiles->largest[column]);
    __mmask16 is_larger = _mm512_cmp_ps_mask(top, _mm512_add_ps(largest, _mm512_set1_ps(SLACK)), _CMP_GT_OQ);
    if (!is_larger) {
        return;
    }
    __m512 factor = _mm512_mask_blend_ps(is_larger, _mm512_set1_ps(1.0f), power_of_2(_mm512_sub_ps(largest, top)));
    _mm512_store_ps(tiles->largest[column], _mm512_mask_blend_ps(is_larger, largest, top));
    _mm512_store_ps(tiles->total[column], _mm512_mul_ps(_mm512_load_ps(tiles->total[column]), factor));
    /* At a row's first keys its sums are 0. */
    if (!_mm512_mask_cmp_ps_mask(is_larger, largest, _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ)) {
        return;
    }
    for (ptrdiff_t m = 0; m < tiles->tall; m++) {
        float(*out)[SIDE] = tiles->out[column * tiles->tall + m];
        for (int i = 0; i < SIDE; i++) {
            _mm512_store_ps(out[i], _mm512_mul_ps(_mm512_load_ps(out[i]), factor));
        }
    }
}

/* Turn the scores of a step of keys with a tile of rows into pairs of weights. */
INLINE void
weigh(Tiles *tiles, ptrdiff_t column, float (*scores)[SIDE], char *weights, __m512 factor)
{
    /* Words of two keys' weights of a row. */
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                           20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512 largest = _mm512_load_ps(tiles->largest[column]), sum[4] = {0};
    /* Of a row that saw no key yet: its weights are 0. */
    __mmask16 is_none = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
    largest = _mm512_mask_blend_ps(is_none, largest, _mm512_setzero_ps());
    for (int j = 0; j < DEPTH; j += 4) {
        __m512 w[4];
        for (int i = 0; i < 4; i++) {
            w[i] = power_of_2(_mm512_fmsub_ps(_mm512_load_ps(scores[j + i]), factor, largest));
            sum[i] = _mm512_add_ps(sum[i], w[i]);
        }
        _mm512_store_si512(weights + j * 32, _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh(w[1], w[0])));
        _mm512_store_si512(weights + j * 32 + 64, _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh(w[3], w[2])));
    }
    __m512 total = _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
    _mm512_store_ps(tiles->total[column], _mm512_add_ps(_mm512_load_ps(tiles->total[column]), total));
}

/* ---- a block of keys --------------------------------------------------------------------------------------- */

INLINE Panel
panel_of(const Layer *layer, const Tiles *tiles, ptrdiff_t number, ptrdiff_t columns, ptrdiff_t begin, ptrdiff_t end)
{
    Panel panel = {.column = number * 2, .wide = columns - number * 2 >= 2 ? 2 : 1, .buffer = number % 2};
    if (number < 0 || panel.column >= columns) {
        return (Panel){0};
    }
    ptrdiff_t least = tiles->position[panel.column][0], most = tiles->position[panel.column + panel.wide - 1][SIDE - 1];
    ptrdiff_t low = layer->window > 0 ? least - layer->window + 1 - begin : 0, high = most + 1 - begin;
    panel.low = low > 0 ? low / DEPTH * DEPTH : 0;
    panel.high = high < end ? (high + DEPTH - 1) / DEPTH * DEPTH : end;
    return panel;
}

/* Take the keys of a block up to `end` into account, as far as some row sees them. While a panel's scores become
 * weights, tiles multiply the next one's keys and the previous one's values. */
INLINE void
add_block(const Layer *layer, Tiles *tiles, ptrdiff_t columns, ptrdiff_t begin, ptrdiff_t end)
{
    __m512 factor = _mm512_set1_ps((layer->softcap > 0 ? 1.0f : layer->scale) * LOG2_E);
    Panel added = {0}, weighed = {0};
    for (ptrdiff_t number = 0; number < (columns + 1) / 2 + 2; number++) {
        Panel scored = panel_of(layer, tiles, number, columns, begin, end);
        for (int i = 0; i < weighed.wide && weighed.low < weighed.high; i++) {
            const int32_t *position = tiles->position[weighed.column + i];
            __m512 top = largest_scores(layer, tiles->scores[weighed.buffer][i], begin, weighed.low, weighed.high, position);
            rescale(tiles, weighed.column + i, _mm512_mul_ps(top, factor));
        }
        for (ptrdiff_t step = 0; step < STEPS; step++) {
            score(tiles, &scored, step);
            for (int i = 0; i < weighed.wide && step * DEPTH >= weighed.low && step * DEPTH < weighed.high; i++) {
                weigh(tiles, weighed.column + i, tiles->scores[weighed.buffer][i] + step * DEPTH,
                      tiles->weights[weighed.buffer][i * STEPS + step], factor);
            }
            if (added.low < added.high) {
                add_values(tiles, &added, step);
            }
        }
        added = weighed;
        weighed = scored;
    }
}

INLINE void
attend_head(const Layer *layer, const Sequence *sequence, ptrdiff_t kv_head, Tiles *tiles)
{
    ptrdiff_t group = layer->heads / layer->kv_heads, most = LARGE_TASK_ROWS, tokens = tokens_of(layer, most);
    /* More heads than rows are computed in several turns. */
    ptrdiff_t turn = group < most ? group : most;
    for (ptrdiff_t begun = sequence->from; begun < sequence->to; begun += tokens) {
        ptrdiff_t count = sequence->to - begun < tokens ? sequence->to - begun : tokens;
        ptrdiff_t from = sequence->past + begun, to = from + count, token = sequence->first + begun;
        ptrdiff_t seen = layer->window > 0 && from >= layer->window ? from - layer->window + 1 : 0;
        for (ptrdiff_t head = 0; head < group; head += turn) {
            ptrdiff_t heads = group - head < turn ? group - head : turn;
            ptrdiff_t columns = (count * heads + SIDE - 1) / SIDE;
            begin_rows(layer, tiles, token, from, count, kv_head * group + head, heads);
            Cursor at = cursor_at(layer, seen);
            for (ptrdiff_t begin = seen / BLOCK_KEYS * BLOCK_KEYS; begin < to; begin += BLOCK_KEYS) {
                ptrdiff_t first = begin < seen ? seen - begin : 0, end = to - begin < BLOCK_KEYS ? to - begin : BLOCK_KEYS;
                end = read_block(layer, sequence, kv_head, &at, first, end, tiles);
                add_block(layer, tiles, columns, begin, end);
            }
            end_rows(layer, tiles, token, count, kv_head * group + head, heads);
        }
    }
}

bool
has_tiles(const Layer *layer)
{
    bool is_whole = layer->head_size % SIDE == 0 && layer->v_size % SIDE == 0;
    return bfloat16_tiles_work() && is_whole && layer->bfloat16 && layer->scale > 0;
}

TARGET void
attend_tiles(const Layer *layer, const Sequence *sequence)
{
    static const uint8_t rows[8] = {16, 16, 16, 16, 16, 16, 16, 16}, bytes[8] = {64, 64, 64, 64, 64, 64, 64, 64};
    Tiles tiles;
    tiles.deep = (layer->head_size + DEPTH - 1) / DEPTH;
    tiles.tall = layer->v_size / SIDE;
    amx_configure(rows, bytes);
    for (ptrdiff_t head = sequence->head; head < sequence->end_head; head++) {
        attend_head(layer, sequence, head, &tiles);
    }
    /* Others use tiles in these threads, too; and for a sleeping thread with live tiles, Linux saves 8 KiB. */
    _tile_release();
}

#else

bool
has_tiles(const Layer *layer)
{
    (void)layer;
    return false;
}

#endif
