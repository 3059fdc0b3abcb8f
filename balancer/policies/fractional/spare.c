/* Adds a replica in the place of a spare one. */
#include "search.h"

#define TRIES 3   /* servers without a suitable expert before a swap is tried */
#define STALE 0.1 /* part of an exchange's gain that may be gone since the round began */

static inline double
above_0(double room)
{
    return room > 0 ? room : 0;
}

static inline double *
spare_of(const Search *search, int32_t expert, int32_t b)
{
    return &search->spare_EB[(size_t)expert * (size_t)search->layer->scenarios + (size_t)b];
}

/* Sums the capacity of each expert's servers: at scale an expert has dozens, and a round asks for each slot. */
static void
find_spare(Search *search)
{
    const Layer *layer = search->layer;
    for (int32_t e = 0; e < layer->experts; e++) {
        for (int32_t b = 0; b < layer->scenarios; b++) {
            const Flow *flow = &layer->flow_B[b];
            double spare = 0;
            for (int32_t n = flow->head_E[e]; n != NONE; n = flow->next_N[n]) {
                spare += above_0(flow->room_S[flow->server_N[n]]);
            }
            *spare_of(search, e, b) = spare;
        }
    }
}

static void
set_room(Search *search, int32_t b, int32_t server, double room)
{
    Flow *flow = &search->layer->flow_B[b];
    double change = above_0(room) - above_0(flow->room_S[server]);
    flow->room_S[server] = room;
    for (int32_t n = flow->first_S[server]; change != 0 && n < flow->first_S[server + 1]; n++) {
        if (flow->expert_N[n] != NONE) {
            *spare_of(search, flow->expert_N[n], b) += change;
        }
    }
}

/* The part of a slot's flow that the other replicas of its expert cannot take. */
static double
loss_of(const Search *search, int32_t slot)
{
    const Layer *layer = search->layer;
    int32_t expert = layer->flow_B[0].expert_N[slot], server = layer->flow_B[0].server_N[slot];
    double loss = 0;
    for (int32_t b = 0; b < layer->scenarios; b++) {
        const Flow *flow = &layer->flow_B[b];
        double left = flow->flow_N[slot] - (*spare_of(search, expert, b) - above_0(flow->room_S[server]));
        loss += left > 0 ? left * search->weight_B[b] : 0;
    }
    return loss;
}

/* The part of each scenario's excess that a slot's server could take instead of the slot's flow: into most_B. Returns
 * the weighted sum. */
static double
relief_of(const Search *search, int32_t server, int32_t slot)
{
    const Layer *layer = search->layer;
    double relief = 0;
    for (int32_t b = 0; b < layer->scenarios; b++) {
        const Flow *flow = &layer->flow_B[b];
        double most = 0;
        if (search->excess_B[b] > 0 && flow->level_S[server] == NONE) {
            most = flow->room_S[server] + (flow->expert_N[slot] == NONE ? 0 : flow->flow_N[slot]);
            most = most < search->excess_B[b] ? most : search->excess_B[b];
            most = most > 0 ? most : 0;
        }
        search->most_B[b] = most;
        relief += most * search->weight_B[b];
    }
    return relief;
}

/* Relief minus loss; 0 for the sole replica of an expert. */
static double
net_of(const Search *search, int32_t slot)
{
    const Flow *flow = &search->layer->flow_B[0];
    int32_t e = flow->expert_N[slot];
    if (e != NONE && flow->next_N[flow->head_E[e]] == NONE) {
        return 0;
    }
    double relief = relief_of(search, flow->server_N[slot], slot);
    return relief > 0 ? relief - (e == NONE ? 0 : loss_of(search, slot)) : 0;
}

static void
sift_down(Search *search, int32_t at)
{
    const double *net_N = search->net_N;
    int32_t *heap = search->heap, slot = heap[at];
    for (;;) {
        int32_t child = 2 * at + 1;
        if (child >= search->heap_count) {
            break;
        }
        if (child + 1 < search->heap_count && net_N[heap[child + 1]] > net_N[heap[child]]) {
            child++;
        }
        if (!(net_N[heap[child]] > net_N[slot])) {
            break;
        }
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = slot;
}

void
find_places(Search *search)
{
    search->heap_count = 0;
    find_spare(search);
    for (int32_t n = 0; n < search->layer->flow_B[0].slots; n++) {
        search->net_N[n] = net_of(search, n);
        if (search->net_N[n] > 0) {
            search->heap[search->heap_count++] = n;
        }
    }
    for (int32_t i = search->heap_count / 2 - 1; i >= 0; i--) {
        sift_down(search, i);
    }
}

/* The slot with the most gain, or NONE. Gains only decrease during a round. */
static int32_t
best_slot(Search *search)
{
    while (search->heap_count > 0) {
        int32_t slot = search->heap[0];
        double before = search->net_N[slot], now = before > 0 ? net_of(search, slot) : 0;
        if (now > 0 && now >= before * (1 - STALE)) {
            return slot;
        }
        search->net_N[slot] = now;
        if (!(now > 0)) {
            search->heap[0] = search->heap[--search->heap_count];
        }
        if (search->heap_count > 0) {
            sift_down(search, 0);
        }
    }
    return NONE;
}

/* Additional cross-node replicas if the slot had another expert. */
static int64_t
more_abroad(Layer *layer, int32_t server, int32_t slot, int32_t expert)
{
    if (layer->node_S == NULL) {
        return 0;
    }
    int32_t old = layer->flow_B[0].expert_N[slot];
    int64_t more = !is_near(layer, server, expert);
    if (old != NONE) {
        Flow *flow = &layer->flow_B[0];
        double kept = flow->flow_N[slot];
        more -= count_cross_node(layer, old);
        flow_take(flow, slot);
        more += count_cross_node(layer, old);
        flow_put(flow, slot, old);
        flow->flow_N[slot] = kept;
    }
    return more;
}

/* The expert with the most excess for the slot; most_B is the slot's. */
static int32_t
best_expert(const Search *search, int32_t slot)
{
    Layer *layer = search->layer;
    const Flow *flow = &layer->flow_B[0];
    int32_t server = flow->server_N[slot], best = NONE;
    double best_gain = WORTH * search->excess + (flow->expert_N[slot] == NONE ? 0 : loss_of(search, slot));
    for (int32_t i = 0; i < search->bound_count; i++) {
        int32_t e = search->bound_list[i];
        const double *bound_B = search->bound_EB + (size_t)e * (size_t)layer->scenarios;
        double gain = 0;
        for (int32_t b = 0; b < layer->scenarios; b++) {
            double most = search->most_B[b] < bound_B[b] ? search->most_B[b] : bound_B[b];
            /* Ties go to the hottest: it has the most load to shift later. */
            gain += (most + 1e-6 * bound_B[b]) * search->weight_B[b];
        }
        if (gain > best_gain && !holds(flow, server, e) &&
            search->cross_node + more_abroad(layer, server, slot, e) <= layer->most_cross_node) {
            best_gain = gain;
            best = e;
        }
    }
    return best;
}

/* The other replicas take over a slot's flow, within their capacity; the first takes the rest. */
static void
hand_over(Search *search, int32_t b, int32_t slot)
{
    Flow *flow = &search->layer->flow_B[b];
    int32_t expert = flow->expert_N[slot], server = flow->server_N[slot];
    double left = flow->flow_N[slot];
    *spare_of(search, expert, b) -= above_0(flow->room_S[server]);
    flow->load_S[server] -= left;
    flow_take(flow, slot);
    set_room(search, b, server, flow->room_S[server] + left);
    for (int32_t n = flow->head_E[expert]; n != NONE; n = flow->next_N[n]) {
        double room = flow->room_S[flow->server_N[n]];
        double given = room < left ? above_0(room) : left;
        flow->flow_N[n] += given;
        flow->load_S[flow->server_N[n]] += given;
        set_room(search, b, flow->server_N[n], room - given);
        left -= given;
    }
    flow->flow_N[flow->head_E[expert]] += left;
    flow->load_S[flow->server_N[flow->head_E[expert]]] += left;
}

/* Reserves what a new replica will take, so that a round does not count it twice. */
static void
book(Search *search, int32_t b, int32_t server, int32_t expert)
{
    Flow *flow = &search->layer->flow_B[b];
    double *bound = &search->bound_EB[(size_t)expert * (size_t)search->layer->scenarios + (size_t)b];
    if (!(search->excess_B[b] > 0) || flow->level_S[server] != NONE) {
        return;
    }
    double taken = flow->room_S[server] < *bound ? flow->room_S[server] : *bound;
    taken = taken < search->excess_B[b] ? taken : search->excess_B[b];
    if (taken > 0) {
        set_room(search, b, server, flow->room_S[server] - taken);
        search->excess_B[b] -= taken;
        search->excess -= taken * search->weight_B[b];
        *bound -= taken;
    }
}

bool
replicate_one(Search *search)
{
    Layer *layer = search->layer;
    const Flow *flow = &layer->flow_B[0];
    for (int32_t tries = 0; tries < TRIES; tries++) {
        int32_t slot = best_slot(search);
        if (slot == NONE) {
            return false;
        }
        int32_t server = flow->server_N[slot];
        relief_of(search, server, slot);
        int32_t expert = best_expert(search, slot);
        /* Once in a round: it changes the gains of the server's other slots. */
        for (int32_t n = flow->first_S[server]; n < flow->first_S[server + 1]; n++) {
            search->net_N[n] = 0;
        }
        if (expert == NONE) {
            continue;
        }
        search->cross_node += more_abroad(layer, server, slot, expert);
        for (int32_t b = 0; b < layer->scenarios; b++) {
            if (layer->flow_B[b].expert_N[slot] != NONE) {
                hand_over(search, b, slot);
            }
            flow_put(&layer->flow_B[b], slot, expert);
            *spare_of(search, expert, b) += above_0(layer->flow_B[b].room_S[server]);
            book(search, b, server, expert);
        }
        search->exchanges++;
        return true;
    }
    return false;
}
