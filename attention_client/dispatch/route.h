/* The loops from what a router chose to what each server is to compute; no Python in here.
 *
 * Letters: P pairs (T tokens times K experts of each), C chunks, S servers, E experts. Nothing is checked here: every
 * id is in range, every array long enough, whoever calls has seen to it.
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

/* The wanted pair whose expert is not one of E, or -1. */
ptrdiff_t find_wrong_expert(const int64_t *ids_P, const uint8_t *wanted_P, ptrdiff_t pairs, int64_t num_experts);

/* Gathers the wanted pairs (all, where wanted_P is NULL) of each expert into chunks that are as even as they can be.
 * experts_E is scratch, zeroed. Returns the number of chunks: at most pairs, and at most E + pairs / chunk_pairs. */
ptrdiff_t group_pairs(const int64_t *ids_P, const uint8_t *wanted_P, ptrdiff_t pairs, int64_t num_experts,
                      int64_t chunk_pairs, Expert *experts_E, int32_t *chunk_of_P, int64_t *expert_C, int64_t *pairs_C);

/* Gives each chunk to the first server whose cumulative share of its expert passes the chunk's draw: `draw` for the
 * first one, `step` more, modulo 1, for each further one. NOWHERE where no share is above 0. */
void choose_by_share(const int64_t *expert_C, ptrdiff_t chunks, const float *shares_SE, ptrdiff_t servers,
                     ptrdiff_t experts, double draw, double step, int64_t *server_C);

/* Moves chunks off the server that would end last, as long as that end gets earlier. ends_S holds the backlogs and
 * becomes when each server ends. Returns the number of moves. */
ptrdiff_t level_chunks(int64_t *server_C, const int64_t *expert_C, const double *work_C, ptrdiff_t chunks,
                       const float *shares_SE, ptrdiff_t servers, ptrdiff_t experts, const double *rate_S,
                       double *ends_S);

/* Fills the tokens of each server, one server's after another's, and their experts there. next_S and last_S are
 * scratch. rows_out holds T * min(S, K), ids_out that times K. */
void split_tokens(const int64_t *ids_P, const int32_t *chunk_of_P, ptrdiff_t tokens, ptrdiff_t top_k,
                  const int64_t *server_C, ptrdiff_t servers, int64_t *count_S, int64_t *next_S, int64_t *last_S,
                  int64_t *rows_out, int32_t *ids_out);

#endif
