#include "layer.h"

#include <math.h>
#include <string.h>

/* The most dispensable expert of a server: the least loaded one that others hold, too, else the one with the least
 * load. NONE: the server holds nothing, or (with `covered`) nothing that others hold, too. */
static int32_t
most_dispensable(const Layer *layer, int32_t server, const int32_t *count_E, bool covered)
{
    const Flow *flow = &layer->flow_B[0];
    int32_t best = NONE;
    double best_loss = INFINITY;
    for (int32_t n = flow->first_S[server]; n < flow->first_S[server + 1]; n++) {
        int32_t e = flow->expert_N[n];
        if (e != NONE && count_E[e] > 1 && layer->load_E[e] / count_E[e] < best_loss) {
            best_loss = layer->load_E[e] / count_E[e];
            best = n;
        }
    }
    for (int32_t n = flow->first_S[server]; best == NONE && !covered && n < flow->first_S[server + 1]; n++) {
        int32_t e = flow->expert_N[n];
        if (e != NONE && (best == NONE || layer->load_E[e] < layer->load_E[flow->expert_N[best]])) {
            best = n;
        }
    }
    return best;
}

static void
count_servers(const Layer *layer, const Held *held, int32_t *count_E)
{
    memset(count_E, 0, (size_t)layer->experts * sizeof(*count_E));
    for (int64_t i = held->first_S[0]; i < held->first_S[layer->servers]; i++) {
        count_E[held->expert[i]]++;
    }
}

/* Fewer slots than before: drops the new expert or another one. Returns a slot for the new one, or NONE. */
static int32_t
make_way(Layer *layer, int32_t server, int32_t newcomer, int32_t *count_E)
{
    int32_t slot = most_dispensable(layer, server, count_E, false);
    if (slot == NONE) {
        count_E[newcomer]--;
        return NONE;
    }
    int32_t other = layer->flow_B[0].expert_N[slot];
    double load = layer->load_E[newcomer], other_load = layer->load_E[other];
    bool newcomer_goes = count_E[newcomer] > 1
                             ? count_E[other] <= 1 || load * count_E[other] <= other_load * count_E[newcomer]
                             : count_E[other] <= 1 && load <= other_load;
    count_E[newcomer_goes ? newcomer : other]--;
    if (newcomer_goes) {
        return NONE;
    }
    take_everywhere(layer, slot);
    return slot;
}

void
begin_slots(Layer *layer, const Held *held)
{
    Flow *flow = &layer->flow_B[0];
    int32_t *count_E = NULL;
    if (held->first_S == NULL) {
        if (fill(layer)) {
            cover(layer);
        } else {
            pack(layer);
        }
        use_free_slots(layer);
        return;
    }
    for (int32_t s = 0; s < layer->servers; s++) {
        int32_t next = flow->first_S[s];
        for (int64_t i = held->first_S[s]; i < held->first_S[s + 1]; i++) {
            int32_t e = held->expert[i], slot = next;
            if (next < flow->first_S[s + 1]) {
                next++;
            } else {
                if (count_E == NULL) {
                    count_E = (int32_t *)layer->scratch;
                    count_servers(layer, held, count_E);
                }
                slot = make_way(layer, s, e, count_E);
            }
            if (slot != NONE) {
                put_everywhere(layer, slot, e);
                flow->flow_N[slot] = held->share == NULL ? 1 : held->share[i];
            }
        }
    }
    cover(layer);
}

void
cover(Layer *layer)
{
    Flow *flow = &layer->flow_B[0];
    int32_t *count_E = (int32_t *)layer->scratch;
    for (int32_t e = 0; e < layer->experts; e++) {
        count_E[e] = replicas(flow, e);
    }
    for (;;) {
        /* The hottest first; usually there is none. */
        int32_t expert = NONE, slot = NONE;
        for (int32_t e = 0; e < layer->experts; e++) {
            if (count_E[e] == 0 && (expert == NONE || layer->load_E[e] > layer->load_E[expert])) {
                expert = e;
            }
        }
        if (expert == NONE) {
            return;
        }
        double least = INFINITY;
        bool found_free = false;
        for (int32_t s = 0; s < layer->servers; s++) {
            int32_t empty = free_slot(flow, s);
            int32_t one = empty != NONE ? empty : most_dispensable(layer, s, count_E, true);
            double full = 0;
            for (int32_t n = flow->first_S[s]; n < flow->first_S[s + 1]; n++) {
                full += flow->expert_N[n] == NONE ? 0 : layer->load_E[flow->expert_N[n]] / count_E[flow->expert_N[n]];
            }
            full /= layer->speed_S[s];
            if (one != NONE && ((empty != NONE) > found_free || ((empty != NONE) == found_free && full < least))) {
                slot = one;
                least = full;
                found_free = empty != NONE;
            }
        }
        /* There are at least as many slots as experts: a slot is free, or an expert has two. */
        if (flow->expert_N[slot] != NONE) {
            count_E[flow->expert_N[slot]]--;
            take_everywhere(layer, slot);
        }
        put_everywhere(layer, slot, expert);
        flow->flow_N[slot] = 1;
        count_E[expert] = 1;
    }
}

/* Number of an expert's servers on a node. */
static int32_t
replicas_at(const Layer *layer, int32_t expert, int32_t node)
{
    const Flow *flow = &layer->flow_B[0];
    int32_t count = 0;
    for (int32_t n = flow->head_E[expert]; n != NONE; n = flow->next_N[n]) {
        count += layer->node_S[flow->server_N[n]] == node;
    }
    return count;
}

void
limit_abroad(Layer *layer)
{
    Flow *flow = &layer->flow_B[0];
    int64_t cross_node = 0;
    for (int32_t e = 0; layer->node_S != NULL && e < layer->experts; e++) {
        cross_node += count_cross_node(layer, e);
    }
    while (layer->node_S != NULL && cross_node > layer->most_cross_node) {
        /* The coldest expert, and its node with the fewest replicas. */
        int32_t coldest = NONE, smallest = NONE;
        for (int32_t e = 0; e < layer->experts; e++) {
            if ((coldest == NONE || layer->load_E[e] < layer->load_E[coldest]) && count_cross_node(layer, e) > 0) {
                coldest = e;
            }
        }
        for (int32_t n = flow->head_E[coldest]; n != NONE; n = flow->next_N[n]) {
            int32_t node = layer->node_S[flow->server_N[n]];
            if (smallest == NONE || replicas_at(layer, coldest, node) < replicas_at(layer, coldest, smallest)) {
                smallest = node;
            }
        }
        for (int32_t n = flow->head_E[coldest]; n != NONE;) {
            int32_t next = flow->next_N[n];
            if (layer->node_S[flow->server_N[n]] == smallest) {
                take_everywhere(layer, n);
            }
            n = next;
        }
        cross_node--;
    }
}
