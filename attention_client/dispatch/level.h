/* Levels the work of a layer call over the servers that hold its experts.
 *
 * A server that computes n pairs of an expert takes rate x (1 + n / load_pairs) seconds: it reads the expert's weights
 * once, whatever n is. The call ends when its last server does. So few experts per server are best for a small
 * batch, and even pairs for a large one.
 *
 * Letters: S servers, E experts, R replicas: of the call's experts only, by expert, then by server.
 */
#ifndef EAAS_DISPATCH_LEVEL_H
#define EAAS_DISPATCH_LEVEL_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    ptrdiff_t servers, experts, replicas;
    const double *rate_S;    /* seconds for the load of an expert's weights */
    double *pair_S;          /* and for a pair: rate / load_pairs */
    const double *backlog_S; /* seconds until the server begins */
    int32_t *server_R, *expert_R;
    int32_t *first_E;         /* E + 1: replicas of each expert */
    int32_t *first_S, *own_R; /* S + 1: replicas of each server, as places in own_R */
    int64_t *pairs_R;
    /* What follows from pairs_R. */
    double *ends_S;    /* seconds until the server ends */
    int32_t *active_S; /* its experts with pairs; servers without any are not asked */
    /* Scratch. */
    uint8_t *closed_S; /* servers that take nothing */
    uint8_t *tried_S;
    int8_t *failed_depth_S; /* the longest chain by which a server could not be relieved; -1: untried */
    double *failed_ends_S;  /* and when it ended then */
    int64_t *kept_R;
    double *kept_ends_S;
    int32_t *kept_active_S;
    void *search; /* SEARCH_BYTES */
} Spread;

extern const size_t SEARCH_BYTES;

/* Computes pair_S, ends_S and active_S. */
void count_work(Spread *spread, double load_pairs);

/* Moves pairs between the replicas of their experts until no server can end much sooner: within 1 % of the least for
 * small calls. Then asks fewer servers where that ends the call sooner, because a request costs time, too.
 * `draw`, in [0, 1), chooses among equal servers. */
void level_work(Spread *spread, double draw);

#endif
