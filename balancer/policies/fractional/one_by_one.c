/* Places replicas one by one, each on the server with a free slot that is least full with it. */
#include <math.h>
#include <string.h>

#include "../native/replicate.h"
#include "layer.h"

typedef struct {
    Layer *layer;
    double *full_S;  /* how full servers are, in units of what is placed */
    int32_t *open_S; /* servers with a free slot, ascending */
    int32_t open;
    double lowest;   /* no open server is below it with one more replica */
    int64_t cross_node;
    int64_t *count_E;
    uint64_t *keys, *sorting; /* by expert */
} Placing;

static Placing
place_arrays(Layer *layer, Arena *arena)
{
    size_t servers = (size_t)layer->servers, experts = (size_t)layer->experts;
    Placing placing = {.layer = layer};
    placing.full_S = carve(arena, servers, sizeof(double));
    placing.open_S = carve(arena, servers, sizeof(int32_t));
    placing.count_E = carve(arena, experts, sizeof(int64_t));
    placing.keys = carve(arena, experts, sizeof(uint64_t));
    placing.sorting = carve(arena, experts, sizeof(uint64_t));
    return placing;
}

size_t
one_by_one_bytes(const Layer *layer)
{
    Arena arena = {0};
    Layer copy = *layer;
    place_arrays(&copy, &arena);
    return arena.used;
}

static Placing
begin(Layer *layer)
{
    Arena arena = {.block = layer->scratch};
    Placing placing = place_arrays(layer, &arena);
    memset(placing.full_S, 0, (size_t)layer->servers * sizeof(double));
    for (int32_t s = 0; s < layer->servers; s++) {
        if (free_slot(&layer->flow_B[0], s) != NONE) {
            placing.open_S[placing.open++] = s;
        }
    }
    return placing;
}

/* Index of the open server that would be least full, the first of equals. `lowest` is raised if that is found. */
static int32_t
least_full(Placing *placing, int32_t expert, double load)
{
    const Layer *layer = placing->layer;
    int32_t best = NONE;
    double best_full = INFINITY, least = INFINITY;
    for (int32_t i = 0; i < placing->open; i++) {
        int32_t s = placing->open_S[i];
        double full = (placing->full_S[s] + load) / layer->speed_S[s];
        least = full < least ? full : least;
        if (full < best_full && !holds(&layer->flow_B[0], s, expert) &&
            (placing->cross_node < layer->most_cross_node || is_near(layer, s, expert))) {
            best_full = full;
            best = i;
            if (full <= placing->lowest) {
                return best;
            }
        }
    }
    placing->lowest = least;
    return best;
}

/* False: no open server may have it. */
static bool
place_one(Placing *placing, int32_t expert, double load)
{
    Layer *layer = placing->layer;
    int32_t index = least_full(placing, expert, load);
    if (index == NONE) {
        return false;
    }
    int32_t server = placing->open_S[index];
    int64_t before = count_cross_node(layer, expert);
    put_everywhere(layer, free_slot(&layer->flow_B[0], server), expert);
    placing->full_S[server] += load;
    placing->cross_node += count_cross_node(layer, expert) - before;
    if (free_slot(&layer->flow_B[0], server) == NONE) {
        size_t after = (size_t)(--placing->open - index);
        memmove(placing->open_S + index, placing->open_S + index + 1, after * sizeof(int32_t));
    }
    return true;
}

void
pack(Layer *layer)
{
    Placing placing = begin(layer);
    int64_t *count_E = placing.count_E;
    replicate(layer->load_E, layer->experts, layer->flow_B[0].slots - layer->experts, layer->servers, false, count_E,
              NULL, placing.keys);
    for (int32_t e = 0; e < layer->experts; e++) {
        placing.keys[e] = falling_key(layer->load_E[e] / (double)count_E[e], e);
    }
    sort_keys(placing.keys, placing.sorting, layer->experts);
    for (int32_t i = 0; i < layer->experts; i++) {
        int32_t e = item_of(placing.keys[i]);
        for (int64_t r = 0; r < count_E[e]; r++) {
            placing.lowest = 0;
            if (!place_one(&placing, e, layer->load_E[e] / (double)count_E[e])) {
                break;
            }
        }
    }
}

void
use_free_slots(Layer *layer)
{
    const Flow *flow = &layer->flow_B[0];
    Placing placing = begin(layer);
    uint64_t *heap = placing.keys;
    ptrdiff_t size = 0;
    if (placing.open == 0) {
        return;
    }
    for (int32_t n = 0; n < flow->slots; n++) {
        placing.full_S[flow->server_N[n]] += flow->expert_N[n] != NONE;
    }
    for (int32_t e = 0; e < layer->experts; e++) {
        placing.count_E[e] = replicas(flow, e);
        placing.cross_node += count_cross_node(layer, e);
        if (placing.count_E[e] > 0) {
            rise(heap, size++, falling_key(layer->load_E[e] / (double)placing.count_E[e], e));
        }
    }
    while (size > 0 && placing.open > 0) {
        int32_t e = item_of(heap[0]);
        if (place_one(&placing, e, 1)) {
            replace_top(heap, size, falling_key(layer->load_E[e] / (double)++placing.count_E[e], e));
        } else {
            drop_top(heap, &size);
        }
    }
}
