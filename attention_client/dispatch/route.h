/* The loops of dispatch, without Python.
 *
 * Letters: P pairs (T tokens times K experts of each), C chunks, S servers, E experts. Nothing is checked here: the
 * caller has checked all ids and array lengths.
 */
#ifndef EAAS_DISPATCH_ROUTE_H
#define EAAS_DISPATCH_ROUTE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NO_CHUNK (-1)
#define NO_EXPERT (-1)
#define NOWHERE (-1)

typedef struct {
    int64_t pairs;
    int64_t chunks;
    int64_t first; /* chunk */
    int64_t seen;
} Expert;

/* The first wanted pair whose expert is outside E, or -1. */
ptrdiff_t find_wrong_expert(const int64_t *ids_P, const uint8_t *wanted_P, ptrdiff_t pairs, int64_t num_experts);

/* Groups the wanted pairs of each expert into even chunks.
 * experts_E is scratch, zeroed. Returns the number of chunks: at most pairs, and at most E + pairs / chunk_pairs. */
ptrdiff_t group_pairs(const int64_t *ids_P, const uint8_t *wanted_P, ptrdiff_t pairs, int64_t num_experts,
                      int64_t chunk_pairs, Expert *experts_E, int32_t *chunk_of_P, int64_t *expert_C, int64_t *pairs_C);

/* Assigns each chunk to the first server whose cumulative share of the expert passes the chunk's draw: `draw` for
 * the first chunk, `step` more, modulo 1, for each next one. NOWHERE if no share is above 0. */
void choose_by_share(const int64_t *expert_C, ptrdiff_t chunks, const float *shares_SE, ptrdiff_t servers,
                     ptrdiff_t experts, double draw, double step, int64_t *server_C);

/* Moves chunks off the server that would finish last, while that makes the call finish earlier. ends_S holds the
 * backlogs and becomes the finish times. Returns the number of moves. */
ptrdiff_t level_chunks(int64_t *server_C, const int64_t *expert_C, const double *work_C, ptrdiff_t chunks,
                       const float *shares_SE, ptrdiff_t servers, ptrdiff_t experts, const double *rate_S,
                       double *ends_S);

/* Fills the tokens of each server, server by server, and their experts there. next_S and last_S are scratch.
 * rows_out holds T * min(S, K) rows, ids_out that times K. */
void split_tokens(const int64_t *ids_P, const int32_t *chunk_of_P, ptrdiff_t tokens, ptrdiff_t top_k,
                  const int64_t *server_C, ptrdiff_t servers, int64_t *count_S, int64_t *next_S, int64_t *last_S,
                  int64_t *rows_out, int32_t *ids_out);

#endif
