/* Fills servers along the chains of experts that two or more of them hold. */
#include "refill.h"

static void
queue_leaf(Refill *refill, int32_t server)
{
    if (refill->state_S[server] == OPEN && refill->common_S[server] <= 1) {
        refill->state_S[server] = QUEUED;
        refill->queue_S[refill->queued++] = server;
    }
}

/* The server will not get the slot's expert. */
static void
pass_up(Refill *refill, int32_t slot)
{
    const Flow *flow = refill->flow;
    int32_t expert = flow->expert_N[slot], server = flow->server_N[slot];
    refill->may_N[slot] = 0;
    if (refill->open_E[expert]-- >= 2) {
        refill->common_S[server]--;
        queue_leaf(refill, server);
    }
    if (refill->open_E[expert] == 1) {
        int32_t last = flow->head_E[expert];
        while (!refill->may_N[last]) {
            last = flow->next_N[last];
        }
        refill->common_S[flow->server_N[last]]--;
        queue_leaf(refill, flow->server_N[last]);
    }
}

/* All other servers give the slot's expert up. */
static void
claim(Refill *refill, int32_t slot)
{
    const Flow *flow = refill->flow;
    for (int32_t n = flow->head_E[flow->expert_N[slot]]; n != NONE; n = flow->next_N[n]) {
        if (n != slot && refill->may_N[n]) {
            pass_up(refill, n);
        }
    }
}

/* Gives a leaf its own experts and the missing load of the common one; or defers it. */
void
close_leaf(Refill *refill, int32_t server)
{
    const Flow *flow = refill->flow;
    double lacks = capacity_of(refill, server);
    int32_t own = 0, common = NONE;
    for (int32_t n = flow->first_S[server]; n < flow->first_S[server + 1]; n++) {
        int32_t e = flow->expert_N[n];
        if (e == NONE || !refill->may_N[n]) {
            continue;
        }
        if (refill->open_E[e] > 1) {
            common = n;
        } else {
            lacks -= refill->rest_E[e];
            own++;
        }
    }
    double rest = common == NONE ? 0 : refill->rest_E[flow->expert_N[common]];
    bool exact = lacks >= -refill->crumb && lacks <= rest + refill->crumb;
    bool all = common != NONE && lacks >= rest - refill->crumb;
    int64_t spare = refill->spare - (slots_of(refill, server) - 1) + own + (exact && all);
    if (all) {
        claim(refill, common);
    } else if (common != NONE && (!exact || spare < 0)) {
        pass_up(refill, common);
    }
    if (!exact || spare < 0) {
        refill->state_S[server] = LATE;
        refill->late_S[refill->late++] = server;
        return;
    }
    refill->state_S[server] = CLOSED;
    refill->spare = spare;
    for (int32_t n = flow->first_S[server]; n < flow->first_S[server + 1]; n++) {
        int32_t e = flow->expert_N[n];
        if (e == NONE || !refill->may_N[n]) {
            continue;
        }
        bool part = n == common && !all;
        if (part && lacks <= refill->crumb) {
            pass_up(refill, n);
            continue;
        }
        give(refill, server, e, part ? lacks : refill->rest_E[e]);
        refill->rest_E[e] = part ? rest - lacks : 0;
        refill->live_E[e] = part;
        pass_up(refill, n);
    }
}

/* The same to start the flow, even with too much or too little load. */
void
load_leaf(Refill *refill, int32_t server)
{
    Flow *flow = refill->flow;
    double capacity = capacity_of(refill, server), load = 0;
    int32_t common = NONE;
    for (int32_t n = flow->first_S[server]; n < flow->first_S[server + 1]; n++) {
        int32_t e = flow->expert_N[n];
        if (e == NONE || !refill->may_N[n]) {
            continue;
        }
        if (refill->open_E[e] > 1) {
            common = n;
        } else {
            load += flow->flow_N[n] = refill->rest_E[e];
        }
        pass_up(refill, n);
    }
    if (common != NONE && load < capacity) {
        double *rest = &refill->rest_E[flow->expert_N[common]];
        flow->flow_N[common] = *rest < capacity - load ? *rest : capacity - load;
        load += flow->flow_N[common];
        *rest -= flow->flow_N[common];
    }
    flow->load_S[server] = load;
    refill->state_S[server] = CLOSED;
}

/* If no server is a leaf: the one with the most common experts gives up the one that most others have. */
static void
loosen(Refill *refill)
{
    const Flow *flow = refill->flow;
    int32_t most = NONE, slot = NONE;
    for (int32_t s = 0; s < flow->servers; s++) {
        if (refill->state_S[s] == OPEN && (most == NONE || refill->common_S[s] > refill->common_S[most])) {
            most = s;
        }
    }
    for (int32_t n = flow->first_S[most]; n < flow->first_S[most + 1]; n++) {
        int32_t e = flow->expert_N[n];
        if (refill->may_N[n] && (slot == NONE || refill->open_E[e] > refill->open_E[flow->expert_N[slot]])) {
            slot = n;
        }
    }
    pass_up(refill, slot);
}

void
follow_chains(Refill *refill, void (*settle)(Refill *, int32_t))
{
    int32_t servers = refill->flow->servers, without = 0;
    for (int32_t s = 0; s < servers; s++) {
        without += refill->state_S[s] == CLOSED;
        queue_leaf(refill, s);
    }
    for (int32_t next = 0; next < servers - without; next++) {
        while (next == refill->queued) {
            loosen(refill);
        }
        settle(refill, refill->queue_S[next]);
    }
}

/* Replicas that the shares so far do not use are no links of a chain. */
void
pass_up_unused(Refill *refill)
{
    const Flow *flow = refill->flow;
    for (int32_t n = 0; n < flow->slots; n++) {
        int32_t e = flow->expert_N[n];
        if (e != NONE && refill->open_E[e] > 1 && refill->unused_N[n]) {
            pass_up(refill, n);
        }
    }
}
