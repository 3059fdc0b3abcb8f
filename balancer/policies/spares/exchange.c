/* Exchanges single experts of spare slots, for all scenarios (samples of the load, with their weights) together.
 *
 * exchange_spares, called by plan.c, is a greedy search: each round gives servers with room a hot expert in their spare
 * slot, then shifts load between replicas again. Nothing is checked here; plan.c makes what `Spares` describes. */
#include "spares.h"

#include <string.h>

#define ROUNDS 6 /* of replacing experts, and shifting load */
#define TIE 1e-6 /* weight of an expert's whole load in its gain: of two equal gains the hotter expert wins */

/* Shifts load to the replicas where possible; returns the excess, over all scenarios. */
static double
push(Spares *spares)
{
    double excess = 0;
    for (int32_t b = 0; b < spares->scenarios; b++) {
        spares->excess_B[b] = spares->mean_B[b] > 0 ? flow_push(&spares->flow_B[b], spares->mean_B[b], SLACK) : 0;
        excess += spares->excess_B[b] * spares->weight_B[b];
    }
    return excess;
}

/* Finds the experts with load on servers that are above the mean, or could only pass load to such ones (level_S says
 * which): into bound_EB, bound_E and hot. */
static void
find_hot(Spares *spares)
{
    size_t scenarios = (size_t)spares->scenarios;
    memset(spares->bound_EB, 0, scenarios * (size_t)spares->experts * sizeof(double));
    memset(spares->bound_E, 0, (size_t)spares->experts * sizeof(double));
    for (size_t b = 0; b < scenarios; b++) {
        const Flow *flow = &spares->flow_B[b];
        for (int32_t s = 0; spares->excess_B[b] > 0 && s < spares->servers; s++) {
            for (int32_t n = flow->first_S[s]; flow->level_S[s] != NONE && n < flow->first_S[s + 1]; n++) {
                int32_t e = flow->expert_N[n];
                if (e != NONE) {
                    spares->bound_EB[(size_t)e * scenarios + b] += flow->flow_N[n];
                    spares->bound_E[e] += flow->flow_N[n] * spares->weight_B[b];
                }
            }
        }
    }
    spares->hot_count = 0;
    for (int32_t e = 0; e < spares->experts; e++) {
        if (spares->bound_E[e] > spares->least) {
            int32_t at = spares->hot_count++;
            for (; at > 0 && spares->bound_E[spares->hot[at - 1]] < spares->bound_E[e]; at--) {
                spares->hot[at] = spares->hot[at - 1];
            }
            spares->hot[at] = e;
        }
    }
}

/* The part of a slot's flow that the other replicas of its expert cannot take. */
static double
loss_of(const Spares *spares, int32_t slot)
{
    double loss = 0;
    for (int32_t b = 0; b < spares->scenarios; b++) {
        const Flow *flow = &spares->flow_B[b];
        double left = flow->flow_N[slot];
        for (int32_t n = flow->head_E[flow->expert_N[slot]]; left > 0 && n != NONE; n = flow->next_N[n]) {
            double room = flow->room_S[flow->server_N[n]];
            left -= n != slot && room > 0 ? room : 0;
        }
        loss += left > 0 ? left * spares->weight_B[b] : 0;
    }
    return loss;
}

/* Load of a server's slots but the last, its spare one, that servers with room could take, up to `most`; `shift` moves it
 * there. */
static double
pass_on(Flow *flow, int32_t server, double most, bool shift)
{
    double sum = 0;
    for (int32_t slot = flow->first_S[server]; slot < flow->first_S[server + 1] - 1 && sum < most; slot++) {
        int32_t e = flow->expert_N[slot];
        double left = e == NONE ? 0 : flow->flow_N[slot] < most - sum ? flow->flow_N[slot] : most - sum;
        for (int32_t n = left > 0 ? flow->head_E[e] : NONE; left > 0 && n != NONE; n = flow->next_N[n]) {
            int32_t t = flow->server_N[n];
            double given = flow->room_S[t] < left ? flow->room_S[t] : left;
            if (t == server || !(given > 0)) {
                continue;
            }
            left -= given;
            sum += given;
            if (shift) {
                flow->flow_N[slot] -= given;
                flow->flow_N[n] += given;
                flow->load_S[server] -= given;
                flow->load_S[t] += given;
                flow->room_S[server] += given;
                flow->room_S[t] -= given;
            }
        }
    }
    return sum;
}

/* Load that a server could take with another expert in its spare slot: into most_B. Returns the weighted sum. */
static double
capacity_of(const Spares *spares, int32_t server)
{
    double sum = 0;
    int32_t slot = spare_slot(spares, server);
    for (int32_t b = 0; b < spares->scenarios; b++) {
        Flow *flow = &spares->flow_B[b];
        double most = 0;
        if (spares->excess_B[b] > 0 && flow->level_S[server] == NONE) {
            most = flow->room_S[server] + (flow->expert_N[slot] == NONE ? 0 : flow->flow_N[slot]);
            most += pass_on(flow, server, spares->excess_B[b], false);
            most = most < spares->excess_B[b] ? most : spares->excess_B[b];
            most = most > 0 ? most : 0;
        }
        spares->most_B[b] = most;
        sum += most * spares->weight_B[b];
    }
    return sum;
}

/* The hot expert of which a server can take most within most_B, if that is more than `best_gain`; else NONE. */
static int32_t
best_expert(const Spares *spares, int32_t server, double best_gain)
{
    size_t scenarios = (size_t)spares->scenarios;
    int32_t best = NONE;
    for (int32_t i = 0; i < spares->hot_count; i++) {
        int32_t e = spares->hot[i];
        const double *bound_B = spares->bound_EB + (size_t)e * scenarios;
        double gain = 0;
        if (!(spares->bound_E[e] * (1 + TIE) > best_gain)) {
            break;
        }
        for (size_t b = 0; b < scenarios; b++) {
            double taken = spares->most_B[b] < bound_B[b] ? spares->most_B[b] : bound_B[b];
            gain += (taken + TIE * bound_B[b]) * spares->weight_B[b];
        }
        if (gain > best_gain && !is_held(&spares->flow_B[0], server, e)) {
            best_gain = gain;
            best = e;
        }
    }
    return best;
}

/* Puts another expert into a spare slot, or none. Other replicas take the load of the one before. */
static void
replace(Spares *spares, int32_t slot, int32_t expert)
{
    for (int32_t b = 0; b < spares->scenarios; b++) {
        Flow *flow = &spares->flow_B[b];
        if (flow->expert_N[slot] != NONE) {
            give_back(flow, slot);
        }
        if (expert != NONE) {
            flow_put(flow, slot, expert);
        }
    }
}

/* Reserves what a new replica will take, so that a round does not count it twice. */
static void
book(Spares *spares, int32_t server, int32_t expert)
{
    for (int32_t b = 0; b < spares->scenarios; b++) {
        Flow *flow = &spares->flow_B[b];
        double *bound = &spares->bound_EB[(size_t)expert * (size_t)spares->scenarios + (size_t)b];
        double taken = spares->most_B[b] < *bound ? spares->most_B[b] : *bound;
        if (taken > flow->room_S[server]) {
            pass_on(flow, server, taken - flow->room_S[server], true);
        }
        flow->room_S[server] -= taken;
        spares->excess_B[b] -= taken;
        *bound -= taken;
    }
}

/* Servers that could take load, most first: into order_S. Returns their number. */
static int32_t
order_servers(Spares *spares)
{
    int32_t count = 0;
    for (int32_t s = 0; s < spares->servers; s++) {
        double capacity = spares->open_S[s] ? capacity_of(spares, s) : 0;
        if (capacity > spares->least) {
            int32_t at = count++;
            spares->capacity_S[s] = capacity;
            for (; at > 0 && spares->capacity_S[spares->order_S[at - 1]] < capacity; at--) {
                spares->order_S[at] = spares->order_S[at - 1];
            }
            spares->order_S[at] = s;
        }
    }
    return count;
}

/* One expert for each server that can take load; returns the number of changes. */
static int32_t
run_round(Spares *spares)
{
    int32_t count = order_servers(spares), changes = 0;
    for (int32_t i = 0; i < count; i++) {
        int32_t s = spares->order_S[i], slot = spare_slot(spares, s), old = spares->flow_B[0].expert_N[slot];
        if (capacity_of(spares, s) > spares->least) {
            int32_t e = best_expert(spares, s, spares->least + (old == NONE ? 0 : loss_of(spares, slot)));
            if (e != NONE) {
                replace(spares, slot, e);
                book(spares, s, e);
                changes++;
            }
        }
    }
    return changes;
}

/* A round that takes less than `least` from servers above the mean is undone. The experts of the slots are the result;
 * the flows are not in balance afterwards. */
void
exchange_spares(Spares *spares)
{
    double excess = push(spares);
    for (int32_t round = 0; round < ROUNDS && excess > spares->least; round++) {
        for (int32_t s = 0; s < spares->servers; s++) {
            spares->before_S[s] = spares->flow_B[0].expert_N[spare_slot(spares, s)];
        }
        find_hot(spares);
        if (run_round(spares) == 0) {
            return;
        }
        double now = push(spares);
        if (excess - now < spares->least) {
            for (int32_t s = 0; s < spares->servers; s++) {
                int32_t slot = spare_slot(spares, s);
                if (spares->flow_B[0].expert_N[slot] != spares->before_S[s]) {
                    replace(spares, slot, spares->before_S[s]);
                }
            }
            return;
        }
        excess = now;
    }
}
