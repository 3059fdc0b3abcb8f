/* The routing of a layer call, without Python: experts' pairs to replicas, servers to their tokens.
 *
 * Letters: P pairs (T tokens times K experts of each), S servers, E experts, R replicas. Nothing is checked here: the
 * caller has checked all ids and array lengths.
 */
#ifndef EAAS_DISPATCH_ROUTE_H
#define EAAS_DISPATCH_ROUTE_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    ptrdiff_t tokens, top_k, servers, experts;
    double load_pairs; /* pairs that take as long as reading the weights of their expert */
    double draw, step;
    const int64_t *ids_P;
    const uint8_t *wanted_P;
    const float *shares_SE;
    const double *rate_S;    /* NULL: no levelling */
    const double *backlog_S; /* NULL likewise */
} Routing;

typedef struct {
    int64_t *count_S; /* tokens of each server */
    double *work_S;    /* experts, and pairs / load_pairs */
    double *pairs_S;
    int64_t *rows_out; /* T * min(S, K) tokens, server by server */
    int32_t *ids_out;  /* their experts there, times K; -1 for another server's */
} Routed;

/* The first wanted pair whose expert is outside E, or -1. */
ptrdiff_t find_wrong_expert(const Routing *routing);

/* Fills `routed`. Returns the number of wanted pairs that have no server, or -1 without memory. */
int64_t route(const Routing *routing, const Routed *routed);

#endif
