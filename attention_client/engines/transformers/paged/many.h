/* Many rows, whose time is that of the products: flash-attention (Dao, 2023) in panels of rows and tiles of keys.
 *
 * A row is a query of one head; the rows of a panel are the lanes of its vectors, so that maxima, weights and sums need no
 * operations across lanes. Both products are of the same kind, c[m][row] += a[m][k] * b[k][row], with b in the L1 cache:
 *
 *     scores[key][row] = keys[key][d] * q[d][row]           out[d][row] += values[key][d] * weights[key][row]
 *
 * Keys and values become words of 32 bits once for all rows of a task: float32, or (PAIRS) two bfloat16, of a key's
 * neighbours or of two keys' values. A tile begins at a multiple of TILE_KEYS of the sequence's own positions, so a row's
 * sums have an order that nothing else in the pass can change. */
#include "tile.h"

#define PANEL 16 /* Rows. */
#define PANELS (TASK_ROWS / PANEL)
#define TILE_KEYS 96
#define VECTORS (PANEL / LANES)
#define BLOCK (12 / VECTORS) /* Of c: its sums fill 12 registers; all b and a value of a have others. */
#define AHEAD 16             /* Keys that are prefetched. */
#define MOST_WIDTH (MOST_HEAD_SIZE + 16)
/* Weights up to exp(SLACK) are kept as they are: most rows scale their sums once. */
#define SLACK 8.0f
#ifdef PAIRS
#define PER_WORD 2
#else
#define PER_WORD 1
#define MULTIPLY_ADD(sum, a, b) ((sum) += (a) * (b))
#endif

typedef struct {
    float scores[TILE_KEYS + BLOCK][PANEL];
    float q[PANELS][MOST_HEAD_SIZE][PANEL];
    float out[PANELS][MOST_HEAD_SIZE + BLOCK][PANEL];
    float largest[PANELS][PANEL], total[PANELS][PANEL];
    int32_t position[PANELS][PANEL];
    /* Of one tile, `width` words of a row apart. */
    float keys[(TILE_KEYS + BLOCK) * MOST_WIDTH], values[TILE_KEYS * MOST_WIDTH];
    ptrdiff_t k_width, v_width;
} Many;

/* Add `count` products of rows of a, whose values are `row` and `step` apart, with b, each along k. */
INLINE void
multiply(ptrdiff_t count, const float *a, ptrdiff_t row, ptrdiff_t step, const float (*b)[PANEL], ptrdiff_t k,
         float (*c)[PANEL])
{
    for (ptrdiff_t m = 0; m < count; m += BLOCK, a += BLOCK * row, c += BLOCK) {
        Vector sum[BLOCK][VECTORS];
#pragma GCC unroll 12
        for (int i = 0; i < BLOCK; i++) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                load(&sum[i][v], &c[i][v * LANES]);
            }
        }
        const float *at = a;
        for (ptrdiff_t n = 0; n < k; n++, at += step) {
            Vector right[VECTORS];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                load(&right[v], &b[n][v * LANES]);
            }
#pragma GCC unroll 12
            for (int i = 0; i < BLOCK; i++) {
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) {
                    MULTIPLY_ADD(sum[i][v], at[i * row], right[v]);
                }
            }
        }
#pragma GCC unroll 12
        for (int i = 0; i < BLOCK; i++) {
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                memcpy(&c[i][v * LANES], &sum[i][v], sizeof(Vector));
            }
        }
    }
}

/* ---- memory ------------------------------------------------------------------------------------------------ */

/* Words of a row of `size` values. */
INLINE ptrdiff_t
words_of(ptrdiff_t size)
{
    return (size + PER_WORD - 1) / PER_WORD;
}

/* Read a row as words; what follows it up to the next whole vector is 0. */
INLINE void
read_words(const Layer *layer, float *to, const char *from, ptrdiff_t size)
{
#ifdef PAIRS
    (void)layer;
    to[words_of(size) - 1] = 0.0f;
    memcpy(to, from, (size_t)size * 2);
#else
    read_row(to, from, size, layer->bfloat16, 1.0f);
#endif
}

INLINE bool
values_are_keys(const Layer *layer)
{
    return PER_WORD == 1 && layer->v_size <= layer->head_size && layer->k == layer->v && layer->k_cache == layer->v_cache &&
           layer->k_token == layer->v_token && layer->k_head == layer->v_head &&
           layer->k_cache_token == layer->v_cache_token && layer->k_cache_head == layer->v_cache_head;
}

/* Read the values of key j; `from` is NULL where there is none. */
INLINE void
read_value(const Layer *layer, Many *many, ptrdiff_t j, const char *from)
{
    float *to = many->values + j / PER_WORD * many->v_width;
#ifdef PAIRS
    for (ptrdiff_t d = 0; d < layer->v_size; d++) {
        uint16_t value = 0;
        uint32_t word = 0;
        if (from != NULL) {
            memcpy(&value, from + d * 2, sizeof value);
        }
        if (j % 2 != 0) {
            memcpy(&word, to + d, sizeof word);
        }
        word |= (uint32_t)value << (j % 2 * 16);
        memcpy(to + d, &word, sizeof word);
    }
#else
    if (from != NULL) {
        read_words(layer, to, from, layer->v_size);
    }
#endif
}

/* Read the keys `first` to `end` of a tile. */
INLINE void
read_tile(const Layer *layer, const Sequence *sequence, ptrdiff_t kv_head, Cursor *at, Cursor *ahead, ptrdiff_t first,
          ptrdiff_t end, ptrdiff_t last, Many *many)
{
    ptrdiff_t size = (ptrdiff_t)value_size(layer), k_bytes = layer->head_size * size, v_bytes = layer->v_size * size;
    const char *key, *value;
    if (first % PER_WORD != 0) {
        read_value(layer, many, first - 1, NULL);
    }
    for (ptrdiff_t j = first; j < end; j++) {
        if (ahead->position < last) {
            next_row(layer, sequence, kv_head, ahead, &key, &value);
            for (ptrdiff_t byte = 0; byte < k_bytes; byte += 64) {
                __builtin_prefetch(key + byte, 0, 2);
            }
            for (ptrdiff_t byte = 0; byte < v_bytes && value != key; byte += 64) {
                __builtin_prefetch(value + byte, 0, 2);
            }
        }
        next_row(layer, sequence, kv_head, at, &key, &value);
        read_words(layer, many->keys + j * many->k_width, key, layer->head_size);
        if (!values_are_keys(layer)) {
            read_value(layer, many, j, value);
        }
    }
    if (end % PER_WORD != 0) {
        read_value(layer, many, end, NULL);
    }
}

/* Begin the rows of `heads` heads from `head` on, of `count` tokens from `token` on, the first of which has `position`.
 * Those that fill the last panel repeat the last row. */
INLINE void
begin_rows(const Layer *layer, Many *many, ptrdiff_t token, ptrdiff_t position, ptrdiff_t count, ptrdiff_t head,
           ptrdiff_t heads)
{
    float words[MOST_HEAD_SIZE];
    ptrdiff_t rows = count * heads;
    for (ptrdiff_t place = 0; place < (rows + PANEL - 1) / PANEL * PANEL; place++) {
        ptrdiff_t r = place < rows ? place : rows - 1, panel = place / PANEL, lane = place % PANEL;
        read_words(layer, words, query_of(layer, token + r / heads, head + r % heads), layer->head_size);
        for (ptrdiff_t d = 0; d < words_of(layer->head_size); d++) {
            many->q[panel][d][lane] = words[d];
        }
        many->position[panel][lane] = (int32_t)(position + r / heads);
        many->largest[panel][lane] = layer->sinks == NULL ? -INFINITY : layer->sinks[head + r % heads];
        many->total[panel][lane] = layer->sinks == NULL ? 0.0f : 1.0f;
        if (lane == 0) {
            memset(many->out[panel], 0, sizeof many->out[panel][0] * (size_t)layer->v_size);
        }
    }
}

INLINE void
end_rows(const Layer *layer, Many *many, ptrdiff_t token, ptrdiff_t count, ptrdiff_t head, ptrdiff_t heads)
{
    float row[MOST_HEAD_SIZE];
    for (ptrdiff_t r = 0; r < count * heads; r++) {
        ptrdiff_t panel = r / PANEL, lane = r % PANEL;
        for (ptrdiff_t d = 0; d < layer->v_size; d++) {
            row[d] = many->out[panel][d][lane] / many->total[panel][lane];
        }
        write_row(out_of(layer, token + r / heads, head + r % heads), row, layer->v_size, layer->bfloat16);
    }
}

/* ---- a panel and a tile ------------------------------------------------------------------------------------ */

/* Choose between the lanes' values. */
INLINE Vector
select_lanes(Integers mask, Vector yes, Vector no)
{
    return (Vector)(((Integers)yes & mask) | ((Integers)no & ~mask));
}

/* Scale and bound scores, and hide those of keys that a row does not see; return the largest of each row. */
INLINE Vector
largest_scores(const Layer *layer, Many *many, ptrdiff_t panel, ptrdiff_t lane, ptrdiff_t begin, ptrdiff_t low,
               ptrdiff_t high, bool masked)
{
    Vector top = (Vector){0} - INFINITY, hidden = top;
    Integers last;
    memcpy(&last, &many->position[panel][lane], sizeof last);
    int32_t window = layer->window > 0 ? (int32_t)layer->window : INT32_MAX;
    for (ptrdiff_t j = low; j < high; j++) {
        Vector score;
        load(&score, &many->scores[j][lane]);
        score *= layer->scale;
        for (int i = 0; i < LANES && layer->softcap > 0; i++) {
            score[i] = layer->softcap * tanhf(score[i] / layer->softcap);
        }
        if (masked) {
            Integers key = (Integers){0} + (int32_t)(begin + j);
            score = select_lanes((key <= last) & (last - key < window), score, hidden);
        }
        top = select_lanes(score > top, score, top);
        memcpy(&many->scores[j][lane], &score, sizeof score);
    }
    return top;
}

/* Turn scores into weights; scale what was summed before, where a score is much larger. */
INLINE void
weigh_panel(const Layer *layer, Many *many, ptrdiff_t panel, ptrdiff_t lane, ptrdiff_t low, ptrdiff_t high, Vector top)
{
    Vector largest, total;
    load(&largest, &many->largest[panel][lane]);
    load(&total, &many->total[panel][lane]);
    Integers is_larger = top > largest + SLACK, any = {0};
    if (memcmp(&is_larger, &any, sizeof any) != 0) {
        top = select_lanes(is_larger, top, largest);
        Vector factor = select_lanes(is_larger, largest - top, (Vector){0});
        exponential(&factor);
        total *= factor;
        for (ptrdiff_t d = 0; d < layer->v_size; d++) {
            Vector out;
            load(&out, &many->out[panel][d][lane]);
            out *= factor;
            memcpy(&many->out[panel][d][lane], &out, sizeof out);
        }
        memcpy(&many->largest[panel][lane], &top, sizeof top);
        largest = top;
    }
    /* Of a row that saw no key yet: its weights are 0. */
    largest = select_lanes(largest == -INFINITY, (Vector){0}, largest);
    for (ptrdiff_t j = low; j < high; j++) {
        Vector weight;
        load(&weight, &many->scores[j][lane]);
        weight -= largest;
        exponential(&weight);
        total += weight;
        memcpy(&many->scores[j][lane], &weight, sizeof weight);
    }
    memcpy(&many->total[panel][lane], &total, sizeof total);
}

/* Take the keys from `first` to `end` of a tile into account, as far as some row of the panel sees them. Pairs of keys are
 * whole: those beyond have values of 0. */
INLINE void
add_tile(const Layer *layer, Many *many, ptrdiff_t panel, ptrdiff_t begin, ptrdiff_t first, ptrdiff_t end)
{
    ptrdiff_t least = many->position[panel][0], most = many->position[panel][PANEL - 1];
    ptrdiff_t low = layer->window > 0 ? least - layer->window + 1 - begin : 0, high = most + 1 - begin;
    low = (low > first ? low : first) / PER_WORD * PER_WORD;
    high = words_of(high < end ? high : end) * PER_WORD;
    if (low >= high) {
        return;
    }
    bool masked = low < first || high > end || begin + high > least + 1 ||
                  (layer->window > 0 && begin + low <= most - layer->window);
    memset(many->scores[low], 0, (size_t)(high - low) * sizeof many->scores[0]);
    multiply(high - low, many->keys + low * many->k_width, many->k_width, 1, many->q[panel], words_of(layer->head_size),
             many->scores + low);
    for (ptrdiff_t lane = 0; lane < PANEL; lane += LANES) {
        Vector top = largest_scores(layer, many, panel, lane, begin, low, high, masked);
        weigh_panel(layer, many, panel, lane, low, high, top);
    }
#ifdef PAIRS
    for (ptrdiff_t j = low; j < high; j += 2) {
        pair_weights(many->scores[j / 2], many->scores[j], many->scores[j + 1]);
    }
#endif
    const float *values = values_are_keys(layer) ? many->keys : many->values;
    multiply(layer->v_size, values + low / PER_WORD * many->v_width, 1, many->v_width, many->scores + low / PER_WORD,
             (high - low) / PER_WORD, many->out[panel]);
}

INLINE void
attend_many(const Layer *layer, const Sequence *sequence, ptrdiff_t kv_head, Many *many)
{
    ptrdiff_t group = layer->heads / layer->kv_heads, most = TASK_ROWS, tokens = tokens_of(layer, TASK_ROWS);
    /* More heads than rows are computed in several turns. */
    ptrdiff_t turn = group < most ? group : most;
    for (ptrdiff_t begun = sequence->from; begun < sequence->to; begun += tokens) {
        ptrdiff_t count = sequence->to - begun < tokens ? sequence->to - begun : tokens;
        ptrdiff_t from = sequence->past + begun, to = from + count, token = sequence->first + begun;
        ptrdiff_t seen = layer->window > 0 && from >= layer->window ? from - layer->window + 1 : 0;
        for (ptrdiff_t head = 0; head < group; head += turn) {
            ptrdiff_t heads = group - head < turn ? group - head : turn;
            begin_rows(layer, many, token, from, count, kv_head * group + head, heads);
            Cursor at = cursor_at(layer, seen), ahead = cursor_at(layer, seen + AHEAD);
            for (ptrdiff_t begin = seen / TILE_KEYS * TILE_KEYS; begin < to; begin += TILE_KEYS) {
                ptrdiff_t first = begin < seen ? seen - begin : 0, end = to - begin < TILE_KEYS ? to - begin : TILE_KEYS;
                read_tile(layer, sequence, kv_head, &at, &ahead, first, end, to, many);
                for (ptrdiff_t panel = 0; panel * PANEL < count * heads; panel++) {
                    add_tile(layer, many, panel, begin, first, end);
                }
            }
            end_rows(layer, many, token, count, kv_head * group + head, heads);
        }
    }
}

static TARGET void
attend_heads(const Layer *layer, const Sequence *sequence)
{
    Many many;
    many.k_width = words_of(layer->head_size) + 16;
    many.v_width = values_are_keys(layer) ? many.k_width : layer->v_size + 16;
    for (ptrdiff_t head = sequence->head; head < sequence->end_head; head++) {
        attend_many(layer, sequence, head, &many);
    }
}
