/* Attention in float32, for one kind of processor: the file that includes this defines NAME, the function's, TARGET and
 * VECTOR_BYTES. */
#include "many.h"
#include "one.h"

/* Load twice as many values as a vector has, in half the steps: bfloat16 as those of even and those of odd index. */
INLINE void
load_pair(Vector *first, Vector *second, const char *row, ptrdiff_t at, bool bfloat16)
{
    load(first, (const float *)(row + at * (bfloat16 ? 2 : 4)));
    if (!bfloat16) {
        load(second, (const float *)(row + at * 4) + LANES);
        return;
    }
    Integers bits = (Integers)*first;
    *first = (Vector)(bits << 16);
    *second = (Vector)(bits & (int32_t)0xffff0000);
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
score_few(Tile *tile, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t size, ptrdiff_t keys, bool bfloat16)
{
    for (ptrdiff_t j = 0; j < keys; j++) {
        const char *row = tile->key_at[j];
        for (ptrdiff_t first = begin; first < end; first += 2) {
            Vector low = {0}, high = {0};
            for (ptrdiff_t d = 0; d < size; d += 2 * LANES) {
                Vector key[2], q;
                load_pair(&key[0], &key[1], row, d, bfloat16);
#pragma GCC unroll 2
                for (int n = 0; n < 2; n++) {
                    load(&q, &tile->q[first][d + n * LANES]);
                    low += q * key[n];
                    load(&q, &tile->q[first + 1][d + n * LANES]);
                    high += q * key[n];
                }
            }
            tile->scores[first][j] = sum_of(&low);
            tile->scores[first + 1][j] = sum_of(&high);
        }
    }
}

/* Add the weighted values of these rows, 2 rows by 4 vectors at a time. */
INLINE void
add_few(Tile *tile, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t size, ptrdiff_t keys, bool bfloat16)
{
    for (ptrdiff_t d = 0; d < size; d += 4 * LANES) {
        for (ptrdiff_t first = begin; first < end; first += 2) {
            Vector sum[2][4];
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                load(&sum[i / 4][i % 4], &tile->out[first + i / 4][d + i % 4 * LANES]);
            }
            for (ptrdiff_t j = 0; j < keys; j++) {
                const float weights[2] = {tile->scores[first][j], tile->scores[first + 1][j]};
                Vector value[4];
                load_pair(&value[0], &value[1], tile->value_at[j], d, bfloat16);
                load_pair(&value[2], &value[3], tile->value_at[j], d + 2 * LANES, bfloat16);
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) {
                    sum[i / 4][i % 4] += weights[i / 4] * value[i % 4];
                }
            }
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) {
                memcpy(&tile->out[first + i / 4][d + i % 4 * LANES], &sum[i / 4][i % 4], sizeof(Vector));
            }
        }
    }
}

INLINE void
begin_one(const Layer *layer, Tile *tile, ptrdiff_t row, const char *q, Form form)
{
    (void)q;
    if (form == IN_BFLOAT16) {
        reorder(tile->q[row], layer->head_size, false);
    }
}

/* Copy a row to float32, and fill it up to whole groups with 0. */
INLINE const char *
copy_row(const Layer *layer, float *to, const char *from, ptrdiff_t size)
{
    memset(to + size, 0, (size_t)(whole_groups(size) - size) * sizeof *to);
    read_row(to, from, size, layer->bfloat16, 1.0f);
    return (const char *)to;
}

INLINE void
score_few_keys(const Layer *layer, Tile *tile, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t key, ptrdiff_t keys,
               ptrdiff_t head, Form form)
{
    for (ptrdiff_t j = 0; j < keys; j++) {
        const char *at = tile->key_rows[tile->block][j] + head * tile->key_step[tile->block][j];
        const char *value = tile->value_rows[tile->block][j] + head * tile->value_step[tile->block][j];
        tile->key_at[j] = form == COPIED ? copy_row(layer, tile->keys[j], at, layer->head_size) : at;
        tile->value_at[j] = form == COPIED ? copy_row(layer, tile->values[j], value, layer->v_size) : value;
    }
    score_few(tile, begin, end, whole_groups(layer->head_size), keys, form == IN_BFLOAT16);
    mask(layer, tile, begin, end, key, keys, keys < KEYS);
    for (ptrdiff_t r = begin; r < end; r++) {
        weigh(tile, r, whole_groups(layer->v_size) / LANES);
    }
}

INLINE void
add_few_values(const Layer *layer, Tile *tile, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t keys, ptrdiff_t head, Form form)
{
    (void)head;
    add_few(tile, begin, end, whole_groups(layer->v_size), keys, form == IN_BFLOAT16);
}

INLINE void
end_one(const Layer *layer, Tile *tile, ptrdiff_t row, Form form)
{
    if (form == IN_BFLOAT16) {
        reorder(tile->out[row], layer->v_size, true);
    }
}

static TARGET void
attend_token(const Layer *layer, const Sequence *sequence)
{
    Tile tile;
    if (layer->head_size % (4 * LANES) != 0 || layer->v_size % (4 * LANES) != 0) {
        attend_one(layer, sequence, &tile, COPIED);
    }
    else if (layer->bfloat16) {
        attend_one(layer, sequence, &tile, IN_BFLOAT16);
    }
    else {
        attend_one(layer, sequence, &tile, IN_FLOAT32);
    }
}

TARGET void
NAME(const Layer *layer, const Sequence *sequence)
{
    (is_one(layer, sequence) ? attend_token : attend_heads)(layer, sequence);
}
