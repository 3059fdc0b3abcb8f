#include "tile.h"

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

INLINE void
write_head(const Layer *layer, const Sequence *sequence, ptrdiff_t kv_head)
{
    size_t k_size = (size_t)layer->head_size * value_size(layer), v_size = (size_t)layer->v_size * value_size(layer);
    ptrdiff_t end = sequence->past + sequence->count;
    ptrdiff_t begin = layer->window > 0 && sequence->count > layer->window ? end - layer->window : sequence->past;
    /* With all tokens in the past, a walk stays in the cache. */
    Sequence all = {.index = sequence->index, .past = end};
    Cursor to = cursor_at(layer, begin), from = to;
    while (from.position < end) {
        const char *key, *value, *new_key, *new_value;
        next_row(layer, sequence, kv_head, &from, &new_key, &new_value);
        next_row(layer, &all, kv_head, &to, &key, &value);
        memcpy((char *)key, new_key, k_size);
        memcpy((char *)value, new_value, v_size);
    }
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

INLINE void
begin_one(const Layer *layer, Tile *tile, ptrdiff_t row, const char *q, bool bfloat16)
{
    (void)q;
    if (bfloat16) {
        reorder(tile->q[row], layer->head_size, false);
    }
}

INLINE void
score_few_keys(const Layer *layer, Tile *tile, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t key, ptrdiff_t keys,
               ptrdiff_t head, bool bfloat16)
{
    score_few(tile, begin, end, layer->head_size / LANES, keys, head, bfloat16);
    mask(layer, tile, begin, end, key, keys, keys < KEYS);
    for (ptrdiff_t r = begin; r < end; r++) {
        weigh(tile, r, layer->v_size / LANES);
    }
}

INLINE void
add_few_values(const Layer *layer, Tile *tile, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t keys, ptrdiff_t head,
               bool bfloat16)
{
    add_few(tile, begin, end, layer->v_size / LANES, keys, head, bfloat16);
}

INLINE void
end_one(const Layer *layer, Tile *tile, ptrdiff_t row, bool bfloat16)
{
    if (bfloat16) {
        reorder(tile->out[row], layer->v_size, true);
    }
}

#define TARGET
#include "one.h"

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

/* Take the keys from `begin` on into account. */
INLINE void
add_keys(const Layer *layer, Tile *tile, ptrdiff_t rows, ptrdiff_t begin, ptrdiff_t keys, bool masked)
{
    ptrdiff_t vectors = (layer->v_size + LANES - 1) / LANES;
    for (ptrdiff_t j = 0; j < keys; j++) {
        read_row(tile->keys[j], tile->key_rows[tile->block][j], layer->head_size, layer->bfloat16, 1.0f);
        read_row(tile->values[j], tile->value_rows[tile->block][j], layer->v_size, layer->bfloat16, 1.0f);
    }
    score_many(tile, rows, layer->head_size);
    mask(layer, tile, 0, rows, begin, keys, masked);
    for (ptrdiff_t r = 0; r < rows; r++) {
        weigh(tile, r, vectors);
    }
    add_values(tile, rows, vectors, keys);
}

INLINE void
begin_row(const Layer *layer, Tile *tile, ptrdiff_t row, const char *q)
{
    (void)layer, (void)tile, (void)row, (void)q;
}

#include "many.h"

bool
is_one(const Layer *layer, const Sequence *sequence)
{
    return sequence->count == 1 && layer->heads / layer->kv_heads <= FEW_ROWS && layer->head_size % (4 * LANES) == 0 &&
           layer->v_size % (4 * LANES) == 0;
}

FOR_EACH_CPU static void
attend_here(const Layer *layer, const Sequence *sequence)
{
    Tile tile;
    bool one = is_one(layer, sequence);
    if (attend_pairs(layer, sequence, one)) {
        return;
    }
    if (one && layer->bfloat16) {
        attend_one(layer, sequence, &tile, true);
    }
    else if (one) {
        attend_one(layer, sequence, &tile, false);
    }
    else {
        for (ptrdiff_t j = 0; j < KEYS; j++) {
            memset(tile.values[j], 0, (size_t)whole_groups(layer->v_size) * sizeof(float));
        }
        for (ptrdiff_t head = sequence->head; head < sequence->end_head; head++) {
            attend_many(layer, sequence, head, &tile);
        }
    }
}

void
attend(const Layer *layer, const Sequence *sequence)
{
    attend_here(layer, sequence);
}

void
write_new(const Layer *layer, const Sequence *sequence)
{
    ptrdiff_t heads = layer->k_cache_head == 0 && layer->v_cache_head == 0 ? 1 : layer->kv_heads;
    for (ptrdiff_t head = 0; head < heads; head++) {
        write_head(layer, sequence, head);
    }
}
