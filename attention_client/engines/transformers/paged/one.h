/* One new token with few heads for each key-value head: its time is that of reading the cache, which goes token by token
 * through all heads. The file that includes this defines `begin_one`, `score_few_keys`, `add_few_values`, `end_one`
 * and the TARGET of all. */
#include "tile.h"

INLINE TARGET void
attend_one(const Layer *layer, const Sequence *sequence, Tile *tile, bool bfloat16)
{
    ptrdiff_t group = layer->heads / layer->kv_heads;
    /* Rows are computed 2 at a time. */
    ptrdiff_t step = group + group % 2, most = ROWS / step, to = sequence->past + 1;
    ptrdiff_t first = layer->window > 0 && to > layer->window ? to - layer->window : 0;
    for (ptrdiff_t begun = 0; begun < layer->kv_heads; begun += most) {
        ptrdiff_t heads = layer->kv_heads - begun < most ? layer->kv_heads - begun : most;
        for (ptrdiff_t h = 0; h < heads; h++) {
            for (ptrdiff_t g = 0; g < step; g++) {
                ptrdiff_t head = (begun + h) * group + (g < group ? g : 0);
                const char *q = query_of(layer, sequence->first, head);
                start_row(layer, tile, h * step + g, head, q, to - 1);
                begin_one(layer, tile, h * step + g, q, bfloat16);
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
                score_few_keys(layer, tile, h * step, (h + 1) * step, key, keys, h, bfloat16);
                add_few_values(layer, tile, h * step, (h + 1) * step, keys, h, bfloat16);
            }
        }
        for (ptrdiff_t h = 0; h < heads; h++) {
            for (ptrdiff_t g = 0; g < group; g++) {
                end_one(layer, tile, h * step + g, bfloat16);
                write_out(layer, tile, h * step + g, sequence->first, (begun + h) * group + g);
            }
        }
    }
}
