#define TARGET
#define VECTOR_BYTES 16
#define NAME attend_plain
#include "floats.h"

/* More rows pay for a conversion of the cache, or for tiles. */
#define FEW_ROWS 8
#define FEW_ROWS_BESIDE_TILES 2

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

bool
is_one(const Layer *layer, const Sequence *sequence)
{
    ptrdiff_t few = has_tiles(layer) ? FEW_ROWS_BESIDE_TILES : FEW_ROWS;
    return sequence->count == 1 && layer->heads / layer->kv_heads <= few;
}

ptrdiff_t
task_tokens(const Layer *layer, ptrdiff_t threads, ptrdiff_t tokens)
{
    ptrdiff_t large = tokens_of(layer, LARGE_TASK_ROWS);
    bool is_enough = has_tiles(layer) && tokens / large * layer->kv_heads >= 4 * threads;
    return is_enough ? large : tokens_of(layer, TASK_ROWS);
}

void
attend(const Layer *layer, const Sequence *sequence)
{
#if defined(__x86_64__)
    if (!is_one(layer, sequence) && has_tiles(layer)) {
        attend_tiles(layer, sequence);
        return;
    }
    if (attend_pairs(layer, sequence)) {
        return;
    }
    if (__builtin_cpu_supports("avx512f")) {
        attend_avx512(layer, sequence);
        return;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        attend_avx2(layer, sequence);
        return;
    }
#endif
    attend_plain(layer, sequence);
}

void
write_new(const Layer *layer, const Sequence *sequence)
{
    ptrdiff_t heads = layer->k_cache_head == 0 && layer->v_cache_head == 0 ? 1 : layer->kv_heads;
    for (ptrdiff_t head = 0; head < heads; head++) {
        write_head(layer, sequence, head);
    }
}
