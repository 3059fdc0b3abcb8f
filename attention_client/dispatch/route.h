/* The routing of a layer call, without Python: experts' pairs to replicas, servers to their tokens.
 *
 * Letters: P pairs (T tokens times K experts of each), S servers, E experts, X experts and one (E + 1), N replicas of
 * the placement, R replicas of the call's experts. Nothing is checked here: the caller has checked all ids, servers and
 * array lengths.
 */
#ifndef EAAS_DISPATCH_ROUTE_H
#define EAAS_DISPATCH_ROUTE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    ptrdiff_t tokens, top_k, servers, experts;
    double load_pairs; /* pairs that take as long as reading the weights of their expert */
    double draw; /* `draw_of` this call: where the first chunk looks up the shares, from 0 to below 1 */
    const int64_t *ids_P;
    const uint8_t *wanted_P;
    const int32_t *first_X;  /* where each expert's replicas begin in the next two */
    const int32_t *server_N; /* ascending for each expert */
    const float *share_N;
    const double *rate_S;    /* NULL: no levelling */
    const double *backlog_S; /* NULL likewise */
} Routing;

typedef struct {
    int64_t *count_S; /* tokens of each server */
    double *work_S;    /* experts, and pairs / load_pairs */
    double *pairs_S;
    int64_t *rows_out; /* `most_rows` tokens, server by server; T * min(S, K) are always enough */
    int32_t *ids_out;  /* their experts there, times K; -1 for another server's */
    int64_t most_rows;
} Routed;

/* The draw of a layer's call: evenly spread over the calls of the layer, and over the layers of a pass. Counted by layer,
 * because layers call in turns, and every second or fourth number of an even sequence is not evenly spread. */
double draw_of(uint64_t call, uint64_t layer);

/* Whether first_X lies in ascending order in `count` replicas, and each expert's servers in ascending order in
 * `servers`. */
bool are_replicas(const int32_t *first_X, ptrdiff_t experts, const int32_t *server_N, ptrdiff_t count,
                  ptrdiff_t servers);

/* The first wanted pair whose expert is outside E, or -1. */
ptrdiff_t find_wrong_expert(const Routing *routing);

/* Bytes that `route` needs as `workspace`, aligned to 8, for calls of at most so many pairs where the experts of a layer
 * have at most so many replicas. */
size_t route_workspace(ptrdiff_t pairs, ptrdiff_t servers, ptrdiff_t experts, ptrdiff_t replicas);

/* Fills `routed`. Returns the number of wanted pairs that have no server, or -1 if there are more than `most_rows`. */
int64_t route(const Routing *routing, const Routed *routed, void *workspace);

#endif
