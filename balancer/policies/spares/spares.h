/* Chooses the experts of spare slots, for one layer.
 *
 * Letters: B scenarios, E experts, S servers, N slots; see eaas/minmax/flow.h for the flow. The last slot of a server
 * is its spare one, and the only one that changes. A scenario's loads count as parts of its mean server load.
 */
#ifndef EAAS_SPARES_SPARES_H
#define EAAS_SPARES_SPARES_H

#include "../../../eaas/minmax/flow.h"

#define SLACK 0.01 /* servers that are this far above the mean are not relieved */

typedef struct {
    int32_t scenarios, servers, experts;
    const bool *open_S; /* servers that may load a replica now */
    double least;       /* what a load must take from servers above the mean, as a mean over the scenarios */
    Flow *flow_B;       /* B + 1 with the same experts in the same slots, each with its own flow; the last is for the
                           mean of the scenarios */
    double *mean_B;     /* B + 1: the load per speed */
    double *weight_B;   /* B + 1: 1 over B and the mean server load */
    double *excess_B;   /* load above the mean that the replicas cannot shift */
    double *bound_EB;   /* an expert's load on servers with excess, and on those that could only pass excess on */
    double *bound_E;    /* the weighted sum of it over the scenarios, at the round's begin */
    double *most_B;     /* scratch: load that a server could take */
    double *capacity_S;
    int32_t *hot;       /* experts whose bound_E is worth a load, the hottest first */
    int32_t hot_count;
    int32_t *order_S, *before_S;
    uint8_t *empty_S;
} Spares;

static inline int32_t
spare_slot(const Spares *spares, int32_t server)
{
    return spares->flow_B[0].first_S[server + 1] - 1;
}

static inline bool
is_held(const Flow *flow, int32_t server, int32_t expert)
{
    for (int32_t n = flow->head_E[expert]; n != NONE; n = flow->next_N[n]) {
        if (flow->server_N[n] == server) {
            return true;
        }
    }
    return false;
}

/* Empties a slot. The other replicas of its expert take its flow within their capacity, and the last of them the rest,
 * with which it may be above the mean. */
void give_back(Flow *flow, int32_t slot);

/* refill.c: fills spare slots that are empty, or that the mean of the scenarios hardly needs, if its excess is large.
 * The scenarios' flows must have none in spare slots. */
void refill_spares(Spares *spares);

/* exchange.c: exchanges experts of spare slots while that takes excess from the scenarios. */
void exchange_spares(Spares *spares);

#endif
