/* Shared by the parts of refill.c; see there. */
#ifndef EAAS_FRACTIONAL_REFILL_H
#define EAAS_FRACTIONAL_REFILL_H

#include "items.h"

typedef struct {
    Layer *layer;
    Flow *flow;
    double *rest_E;   /* load not given to any server yet */
    double *give_N;   /* loads given to a server, from its first slot on; `given_N` has the experts */
    int32_t *given_N;
    int32_t *gives_S; /* how many */
    int32_t *open_E;  /* open servers that hold it and have not given it up */
    int32_t *common_S; /* number of a server's experts that others have, too */
    int32_t *queue_S, *late_S;
    int32_t *live_E;  /* whether (the rest of) the expert is not given yet */
    int32_t *may_N;   /* whether the server may get the slot's expert */
    int32_t *unused_N; /* whether its share is negligible */
    int32_t *state_S;
    int32_t queued, late;
    int64_t spare;    /* items that open servers could hold, minus existing ones */
    double mean, crumb;
    Items items, own, out;
} Refill;

/* state_S */
enum { OPEN, QUEUED, LATE, CLOSED };

static inline int32_t
slots_of(const Refill *refill, int32_t server)
{
    return refill->flow->first_S[server + 1] - refill->flow->first_S[server];
}

static inline double
capacity_of(const Refill *refill, int32_t server)
{
    return refill->mean * refill->layer->speed_S[server];
}

static inline void
give(Refill *refill, int32_t server, int32_t expert, double load)
{
    int32_t at = refill->flow->first_S[server] + refill->gives_S[server]++;
    refill->given_N[at] = expert;
    refill->give_N[at] = load;
}

/* chains.c: calls `settle` for each server once it is a leaf; load_leaf begins a flow, close_leaf closes or defers. */
void follow_chains(Refill *refill, void (*settle)(Refill *, int32_t));
void load_leaf(Refill *refill, int32_t server);
void close_leaf(Refill *refill, int32_t server);
/* Replicas that the shares so far did not use are no links of a chain. */
void pass_up_unused(Refill *refill);

/* deal.c: gives the remaining items to the deferred servers. */
void deal_out(Refill *refill);

#endif
