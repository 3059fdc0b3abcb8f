/* Attention of one sequence's new tokens to its keys and values in a paged cache. */
#ifndef EAAS_ATTEND_H
#define EAAS_ATTEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Of the latent vectors of DeepSeek-V3: 512 values and 64 rotated ones. */
#define MOST_HEAD_SIZE 576

/* One layer of a batch. Strides count values; a row is what one token and head have: head_size values in queries and keys,
 * v_size in values and in `out`. Heads with a stride of 0 share their row. */
typedef struct {
    bool bfloat16; /* of all values; else float32 */
    ptrdiff_t heads, kv_heads, head_size, v_size;
    const char *q, *k, *v; /* new tokens */
    ptrdiff_t q_token, q_head, k_token, k_head, v_token, v_head;
    char *out; /* tokens x heads x v_size */
    char *k_cache, *v_cache;
    ptrdiff_t cache_rows, k_cache_token, k_cache_head, v_cache_token, v_cache_head;
    const int32_t *tables;             /* sequences x blocks: numbers of blocks in the cache */
    ptrdiff_t blocks, block_rows, page;
    ptrdiff_t window; /* tokens that a query sees, itself included, and the size of the ring in the cache; 0: all */
    float scale, softcap; /* softcap: 0 for none */
    const float *sinks;   /* a logit of each head without a value, or NULL */
} Layer;

/* New tokens `first` to `first + count` are tokens `past` to `past + count` of the sequence. One call computes the new ones
 * `from` to `to`, with the key-value heads `head` to `end_head`. */
typedef struct {
    ptrdiff_t index, first, count, past, from, to, head, end_head;
} Sequence;

/* Whether all rows of the cache that the sequence's tokens may have exist. */
bool has_rows(const Layer *layer, const Sequence *sequence);

/* Rows of queries (a token and a head) of one key-value head that one task computes, at most. With more rows,
 * tiles have less to read for each; with fewer, threads have more tasks to share. */
#define TASK_ROWS 128
#define LARGE_TASK_ROWS 256

/* New tokens of so many rows. */
static inline ptrdiff_t
tokens_of(const Layer *layer, ptrdiff_t rows)
{
    ptrdiff_t group = layer->heads / layer->kv_heads;
    return group < rows ? rows / group : 1;
}

/* New tokens of a task, for a number of threads and of the batch's tokens. */
ptrdiff_t task_tokens(const Layer *layer, ptrdiff_t threads, ptrdiff_t tokens);

/* Whether a sequence has one new token, with few heads for each key-value head: its cache is read through many heads. */
bool is_one(const Layer *layer, const Sequence *sequence);

/* Compute these rows of `out`. Online softmax (Milakov and Gimelshein, 2018) in float32. */
void attend(const Layer *layer, const Sequence *sequence);

/* Write the sequence's new keys and values to the cache, once all its rows are computed. */
void write_new(const Layer *layer, const Sequence *sequence);

/* `attend` for one kind of processor each. */
void attend_plain(const Layer *layer, const Sequence *sequence);
void attend_avx2(const Layer *layer, const Sequence *sequence);
void attend_avx512(const Layer *layer, const Sequence *sequence);
/* By products of pairs of bfloat16, with weights in bfloat16. False: this processor, or these sizes, have none. */
bool attend_pairs(const Layer *layer, const Sequence *sequence);
/* By products of tiles of bfloat16, likewise; not for `is_one`. */
bool has_tiles(const Layer *layer);
void attend_tiles(const Layer *layer, const Sequence *sequence);

#endif
