#include "refill.h"

#include <math.h>
#include <string.h>

#define SLACK 1e-9

/* Fills servers anew to exactly their parts of one load, preferring what they hold.
 *
 * A server may be filled with any k - 1 whole experts and a piece of one more: the rest can be dealt to the others (see
 * `choose`) as long as it has no more items than their slots, less one each, plus one.
 *
 *     leaf       an open server with at most one expert in common with other open ones: that expert's part on it is
 *                determined; the next server along the chain is a leaf after that
 *     deferred   a leaf whose own experts are too much, or too little even with all of the common one: filled last, as
 *                in fill.c, but with its own experts first
 */

/* False: too few slots. */
static bool
begin(Refill *refill)
{
    const Layer *layer = refill->layer;
    const Flow *flow = refill->flow;
    double load = 0, speed = 0;
    refill->spare = 1 - layer->experts;
    refill->queued = refill->late = 0;
    for (int32_t e = 0; e < layer->experts; e++) {
        load += refill->rest_E[e] = layer->load_E[e];
        refill->live_E[e] = 1;
        refill->open_E[e] = replicas(flow, e);
    }
    for (int32_t s = 0; s < flow->servers; s++) {
        speed += layer->speed_S[s];
        refill->spare += slots_of(refill, s) - 1;
        refill->gives_S[s] = refill->common_S[s] = 0;
        refill->state_S[s] = slots_of(refill, s) > 0 ? OPEN : CLOSED;
        for (int32_t n = flow->first_S[s]; n < flow->first_S[s + 1]; n++) {
            refill->may_N[n] = flow->expert_N[n] != NONE;
            refill->common_S[s] += refill->may_N[n] && refill->open_E[flow->expert_N[n]] > 1;
        }
    }
    refill->mean = load / speed;
    refill->crumb = load * CRUMB;
    return load > 0 && refill->spare >= 0;
}

/* Fullness of the fullest server over the mean, and the number of replicas not held now. */
static double
judge(const Refill *refill, int64_t *loads)
{
    const Flow *flow = refill->flow;
    double fullest = 0;
    *loads = 0;
    for (int32_t s = 0; s < flow->servers; s++) {
        double load = 0;
        for (int32_t i = flow->first_S[s]; i < flow->first_S[s] + refill->gives_S[s]; i++) {
            load += refill->give_N[i];
            *loads += !holds(flow, s, refill->given_N[i]);
        }
        load /= capacity_of(refill, s);
        fullest = load > fullest ? load : fullest;
    }
    for (int32_t e = 0; e < flow->experts; e++) {
        fullest = refill->live_E[e] ? INFINITY : fullest;
    }
    return fullest;
}

/* Whether no split over the current layout reaches this PAR. Usually the sole replicas prove it. */
static bool
is_out_of_reach(const Refill *refill, double par)
{
    const Flow *held = refill->flow;
    for (int32_t s = 0; s < held->servers; s++) {
        double alone = 0;
        for (int32_t n = held->first_S[s]; n < held->first_S[s + 1]; n++) {
            int32_t e = held->expert_N[n];
            alone += e != NONE && held->next_N[held->head_E[e]] == NONE ? refill->layer->load_E[e] : 0;
        }
        if (alone > par * capacity_of(refill, s) * (1 + SLACK)) {
            return true;
        }
    }
    return flow_push(refill->flow, par * refill->mean, SLACK) > 0;
}

static void
apply(Refill *refill)
{
    Layer *layer = refill->layer;
    Flow *flow = refill->flow;
    int32_t *used_N = refill->may_N;
    memset(used_N, 0, (size_t)flow->slots * sizeof(*used_N));
    for (int32_t n = 0; n < flow->slots; n++) {
        flow->flow_N[n] = 0;
    }
    for (int32_t s = 0; s < flow->servers; s++) {
        int32_t first = flow->first_S[s], end = flow->first_S[s + 1], next = first;
        for (int32_t i = first; i < first + refill->gives_S[s]; i++) {
            for (int32_t n = first; n < end; n++) {
                if (flow->expert_N[n] == refill->given_N[i]) {
                    used_N[n] = 1;
                    flow->flow_N[n] = refill->give_N[i];
                    refill->given_N[i] = NONE;
                    break;
                }
            }
        }
        /* Free slots, then those of unneeded replicas. */
        for (int32_t i = first; i < first + refill->gives_S[s]; i++) {
            if (refill->given_N[i] == NONE) {
                continue;
            }
            int32_t slot = free_slot(flow, s);
            if (slot == NONE) {
                while (used_N[next]) {
                    next++;
                }
                slot = next;
                take_everywhere(layer, slot);
            }
            put_everywhere(layer, slot, refill->given_N[i]);
            flow->flow_N[slot] = refill->give_N[i];
            used_N[slot] = 1;
        }
    }
}

static Refill
place_arrays(Layer *layer, Arena *arena, int32_t slots)
{
    Refill refill = {.layer = layer, .flow = layer->flow_B};
    int32_t **by_server[] = {&refill.gives_S, &refill.common_S, &refill.queue_S, &refill.late_S, &refill.state_S};
    for (size_t i = 0; i < sizeof(by_server) / sizeof(*by_server); i++) {
        *by_server[i] = carve(arena, (size_t)layer->servers, sizeof(int32_t));
    }
    int32_t **by_slot[] = {&refill.given_N, &refill.may_N, &refill.unused_N};
    for (size_t i = 0; i < sizeof(by_slot) / sizeof(*by_slot); i++) {
        *by_slot[i] = carve(arena, (size_t)slots, sizeof(int32_t));
    }
    refill.give_N = carve(arena, (size_t)slots, sizeof(double));
    refill.rest_E = carve(arena, (size_t)layer->experts, sizeof(double));
    refill.open_E = carve(arena, (size_t)layer->experts, sizeof(int32_t));
    refill.live_E = carve(arena, (size_t)layer->experts, sizeof(int32_t));
    Items *lists[] = {&refill.items, &refill.out, &refill.own};
    for (size_t i = 0; i < sizeof(lists) / sizeof(*lists); i++) {
        *lists[i] = make_items(arena, slots + layer->experts + 2, 0);
    }
    return refill;
}

size_t
refill_bytes(const Layer *layer, int32_t slots)
{
    Arena arena = {0};
    Layer copy = *layer;
    place_arrays(&copy, &arena, slots);
    return arena.used;
}

double
refill(Layer *layer)
{
    Flow *flow = &layer->flow_B[0];
    int32_t servers = layer->servers, experts = layer->experts, slots = flow->slots;
    Arena arena = {.block = layer->scratch};
    Refill refill = place_arrays(layer, &arena, slots);
    if (!begin(&refill)) {
        return INFINITY;
    }
    for (int32_t n = 0; n < slots; n++) {
        refill.unused_N[n] = flow->flow_N[n] <= 2 * LEAST_SHARE;
        flow->flow_N[n] = 0;
    }
    pass_up_unused(&refill);
    follow_chains(&refill, load_leaf);
    memset(flow->settled_S, 0, (size_t)servers);
    double now = 0;
    for (int32_t s = 0; s < servers; s++) {
        now = fmax(now, flow->load_S[s] / capacity_of(&refill, s));
    }
    if (now - 1 <= layer->price) {
        return now - 1;
    }
    begin(&refill);
    pass_up_unused(&refill);
    refill.items.crumb = refill.own.crumb = refill.out.crumb = refill.crumb;
    follow_chains(&refill, close_leaf);
    if (refill.late > 0) {
        int32_t *listed = refill.out.expert, live = 0;
        for (int32_t e = 0; e < experts; e++) {
            if (refill.live_E[e]) {
                listed[live++] = e;
            }
        }
        sort_experts(&refill.items, refill.rest_E, listed, live, (int32_t)refill.spare);
        deal_out(&refill);
    }
    int64_t loads;
    double par = judge(&refill, &loads), worth = par + layer->price * (double)loads;
    if (isinf(par) || !is_out_of_reach(&refill, worth)) {
        return worth - 1;
    }
    apply(&refill);
    return par - 1;
}
