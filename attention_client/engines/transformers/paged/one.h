/* One new token with few heads for each key-value head: its time is that of reading the cache, which goes token by token
 * through all heads. The file that includes this defines `begin_one`, `score_few_keys`, `add_few_values` and `end_one`. */
#include "tile.h"

/* Rows of queries, and keys, that are computed together. */
#define ROWS 32
#define KEYS 32

/* How the kernel reads the rows of keys and values: where they lie, or from copies in float32. */
typedef enum { IN_FLOAT32, IN_BFLOAT16, COPIED } Form;

typedef struct {
    float q[ROWS][MOST_HEAD_SIZE];
    float out[ROWS][MOST_HEAD_SIZE];
    /* Keys and values of this block, and of the next one, which is prefetched. */
    const char *key_rows[2][KEYS], *value_rows[2][KEYS];
    /* Bytes to the same token's next head. */
    ptrdiff_t key_step[2][KEYS], value_step[2][KEYS];
    int block;
    /* Of one head: where they are, and float32 copies of rows that are no whole vectors. */
    const char *key_at[KEYS], *value_at[KEYS];
    float keys[KEYS][MOST_HEAD_SIZE], values[KEYS][MOST_HEAD_SIZE];
    uint32_t q_pairs[ROWS][MOST_HEAD_SIZE / 2], weight_pairs[ROWS][KEYS / 2];
    float scores[ROWS][KEYS];
    float largest[ROWS], total[ROWS];
    ptrdiff_t position[ROWS];
} Tile;

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
    Vector sum = {0};
    for (ptrdiff_t j = 0; j < KEYS; j += LANES) {
        Vector weights;
        load(&weights, scores + j);
        weights -= largest;
        exponential(&weights);
        sum += weights;
        memcpy(scores + j, &weights, sizeof weights);
    }
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
    tile->total[row] += sum_of(&sum);
}

/* Sums of values are computed 4 vectors at a time. */
INLINE ptrdiff_t
whole_groups(ptrdiff_t size)
{
    return (size + 4 * LANES - 1) / (4 * LANES) * (4 * LANES);
}

INLINE void
start_row(const Layer *layer, Tile *tile, ptrdiff_t row, ptrdiff_t head, const char *q, ptrdiff_t position)
{
    memset(tile->q[row], 0, (size_t)whole_groups(layer->head_size) * sizeof(float));
    read_row(tile->q[row], q, layer->head_size, layer->bfloat16, layer->scale);
    memset(tile->out[row], 0, (size_t)whole_groups(layer->v_size) * sizeof(float));
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
    ptrdiff_t size = (ptrdiff_t)value_size(layer), k_head = layer->k_cache_head * size, v_head = layer->v_cache_head * size;
    ptrdiff_t k_bytes = (heads - 1) * k_head + layer->head_size * size, v_bytes = (heads - 1) * v_head + layer->v_size * size;
    int next = !tile->block;
    for (ptrdiff_t j = 0; j < KEYS && cursor->position < end; j++) {
        bool is_new = cursor->position >= sequence->past;
        tile->key_step[next][j] = is_new ? layer->k_head * size : k_head;
        tile->value_step[next][j] = is_new ? layer->v_head * size : v_head;
        next_row(layer, sequence, kv_head, cursor, &tile->key_rows[next][j], &tile->value_rows[next][j]);
        /* To L2: it waits for more lines at a time than L1, whose waits would stop this loop. */
        for (ptrdiff_t at = 0; at < k_bytes; at += 64) {
            __builtin_prefetch(tile->key_rows[next][j] + at, 0, 2);
        }
        for (ptrdiff_t at = 0; at < v_bytes && tile->value_rows[next][j] != tile->key_rows[next][j]; at += 64) {
            __builtin_prefetch(tile->value_rows[next][j] + at, 0, 2);
        }
    }
}

INLINE void
write_out(const Layer *layer, Tile *tile, ptrdiff_t row, ptrdiff_t token, ptrdiff_t head)
{
    for (ptrdiff_t d = 0; d < layer->v_size; d++) {
        tile->out[row][d] /= tile->total[row];
    }
    write_row(out_of(layer, token, head), tile->out[row], layer->v_size, layer->bfloat16);
}

/* Of the file that includes this: prepare a query, turn scores of a block's keys with the rows `begin` to `end` into
 * weights, add the weighted values, put the sums in order. */
INLINE void begin_one(const Layer *layer, Tile *tile, ptrdiff_t row, const char *q, Form form);
INLINE void score_few_keys(const Layer *layer, Tile *tile, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t key, ptrdiff_t keys,
                           ptrdiff_t head, Form form);
INLINE void add_few_values(const Layer *layer, Tile *tile, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t keys, ptrdiff_t head,
                           Form form);
INLINE void end_one(const Layer *layer, Tile *tile, ptrdiff_t row, Form form);

INLINE void
attend_one(const Layer *layer, const Sequence *sequence, Tile *tile, Form form)
{
    ptrdiff_t group = layer->heads / layer->kv_heads;
    /* Rows are computed 2 at a time. */
    ptrdiff_t step = group + group % 2, most = ROWS / step, to = sequence->past + 1;
    ptrdiff_t first = layer->window > 0 && to > layer->window ? to - layer->window : 0;
    for (ptrdiff_t begun = sequence->head; begun < sequence->end_head; begun += most) {
        ptrdiff_t heads = sequence->end_head - begun < most ? sequence->end_head - begun : most;
        for (ptrdiff_t h = 0; h < heads; h++) {
            for (ptrdiff_t g = 0; g < step; g++) {
                ptrdiff_t head = (begun + h) * group + (g < group ? g : 0);
                const char *q = query_of(layer, sequence->first, head);
                start_row(layer, tile, h * step + g, head, q, to - 1);
                begin_one(layer, tile, h * step + g, q, form);
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
                score_few_keys(layer, tile, h * step, (h + 1) * step, key, keys, h, form);
                add_few_values(layer, tile, h * step, (h + 1) * step, keys, h, form);
            }
        }
        for (ptrdiff_t h = 0; h < heads; h++) {
            for (ptrdiff_t g = 0; g < group; g++) {
                end_one(layer, tile, h * step + g, form);
                write_out(layer, tile, h * step + g, sequence->first, (begun + h) * group + g);
            }
        }
    }
}
