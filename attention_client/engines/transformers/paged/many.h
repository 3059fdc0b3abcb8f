/* Many rows: the time is that of the products. The file that includes this defines `begin_row`, `add_keys` and the
 * TARGET of both. */
#include "tile.h"

INLINE TARGET void
attend_many(const Layer *layer, const Sequence *sequence, ptrdiff_t kv_head, Tile *tile)
{
    ptrdiff_t group = layer->heads / layer->kv_heads, tokens = ROWS / group > 0 ? ROWS / group : 1;
    /* More heads than rows are computed in several turns. */
    ptrdiff_t heads = group < ROWS ? group : ROWS;
    for (ptrdiff_t begun = sequence->from; begun < sequence->to; begun += tokens) {
        ptrdiff_t count = sequence->to - begun < tokens ? sequence->to - begun : tokens;
        ptrdiff_t from = sequence->past + begun, to = from + count, token = sequence->first + begun;
        ptrdiff_t first = layer->window > 0 && from >= layer->window ? from - layer->window + 1 : 0;
        for (ptrdiff_t turn = 0; turn < group; turn += heads) {
            ptrdiff_t here = group - turn < heads ? group - turn : heads, rows = count * here;
            for (ptrdiff_t r = 0; r < rows; r++) {
                ptrdiff_t head = kv_head * group + turn + r % here;
                const char *q = query_of(layer, token + r / here, head);
                start_row(layer, tile, r, head, q, from + r / here);
                begin_row(layer, tile, r, q);
            }
            Cursor cursor = cursor_at(layer, first);
            tile->block = 0;
            find_rows(layer, sequence, kv_head, 1, &cursor, to, tile);
            for (ptrdiff_t key = first; key < to; key += KEYS) {
                ptrdiff_t keys = to - key < KEYS ? to - key : KEYS;
                tile->block = !tile->block;
                find_rows(layer, sequence, kv_head, 1, &cursor, to, tile);
                bool masked = keys < KEYS || key + keys > from + 1 || (layer->window > 0 && key < to - layer->window);
                add_keys(layer, tile, rows, key, keys, masked);
            }
            for (ptrdiff_t r = 0; r < rows; r++) {
                write_out(layer, tile, r, token + r / here, kv_head * group + turn + r % here);
            }
        }
    }
}
