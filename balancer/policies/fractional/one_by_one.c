/* Places replicas one by one, each on the server with a free slot that is least full with it. */
#include "fill.h"

#include <math.h>
#include <string.h>

#include "../native/replicate.h"

static bool
may_hold(const Layer *layer, int32_t server, int32_t expert, int64_t cross_node)
{
    return !holds(&layer->flow_B[0], server, expert) &&
           (cross_node < layer->most_cross_node || is_near(layer, server, expert));
}

/* Servers with a free slot, ascending. */
typedef struct {
    int32_t *server;
    int32_t count;
} Open;

static void
find_open(const Layer *layer, Open *open)
{
    open->count = 0;
    for (int32_t s = 0; s < layer->servers; s++) {
        if (free_slot(&layer->flow_B[0], s) != NONE) {
            open->server[open->count++] = s;
        }
    }
}

/* Index of the open server that would be least full with the expert, the first of equals. No server is below `lowest`,
 * which is raised if that is found. */
static int32_t
least_full(const Layer *layer, const Open *open, int32_t expert, double load, int64_t cross_node,
           const double *filled_S, double *lowest)
{
    int32_t best = NONE;
    double best_full = INFINITY, least = INFINITY;
    for (int32_t i = 0; i < open->count; i++) {
        int32_t s = open->server[i];
        double full = (filled_S[s] + load) / layer->speed_S[s];
        least = full < least ? full : least;
        if (full < best_full && may_hold(layer, s, expert, cross_node)) {
            best_full = full;
            best = i;
            if (full <= *lowest) {
                return best;
            }
        }
    }
    *lowest = least;
    return best;
}

/* Returns the number of additional cross-node replicas. */
static int64_t
put_into(Layer *layer, Open *open, int32_t index, int32_t expert, double flow)
{
    int32_t server = open->server[index], slot = free_slot(&layer->flow_B[0], server);
    int64_t before = count_cross_node(layer, expert);
    put_everywhere(layer, slot, expert);
    layer->flow_B[0].flow_N[slot] = flow;
    if (free_slot(&layer->flow_B[0], server) == NONE) {
        memmove(open->server + index, open->server + index + 1, (size_t)(--open->count - index) * sizeof(int32_t));
    }
    return count_cross_node(layer, expert) - before;
}

/* With few spare slots: longest processing time first. */
void
pack_items(Layer *layer, Items *items, OneByOne *one)
{
    Open open = {.server = one->open_S};
    Flow *flow = &layer->flow_B[0];
    int64_t *count_E = one->count_E;
    double *filled_S = one->filled_S;
    replicate(layer->load_E, layer->experts, flow->slots - layer->experts, layer->servers, false, count_E, NULL,
              one->heap);
    items->count = items->empty = 0;
    for (int32_t e = 0; e < layer->experts; e++) {
        insert_item(items, layer->load_E[e] / (double)count_E[e], e);
    }
    memset(filled_S, 0, (size_t)layer->servers * sizeof(double));
    find_open(layer, &open);
    int64_t cross_node = 0;
    for (int32_t i = items->count - 1; i >= 0; i--) {
        int32_t e = items->expert[i];
        for (int64_t r = 0; r < count_E[e]; r++) {
            double lowest = 0;
            int32_t index = least_full(layer, &open, e, items->rest[i], cross_node, filled_S, &lowest);
            if (index == NONE) {
                break;
            }
            filled_S[open.server[index]] += items->rest[i];
            cross_node += put_into(layer, &open, index, e, items->rest[i]);
        }
    }
}

void
use_free_slots(Layer *layer, OneByOne *one)
{
    const Flow *flow = &layer->flow_B[0];
    Open open = {.server = one->open_S};
    double *filled_S = one->filled_S;
    int64_t *count_E = one->count_E;
    uint64_t *heap = one->heap;
    find_open(layer, &open);
    if (open.count == 0) {
        return;
    }
    int64_t cross_node = 0;
    ptrdiff_t size = 0;
    for (int32_t i = 0; i < open.count; i++) {
        int32_t s = open.server[i];
        filled_S[s] = flow->slots;
        for (int32_t n = layer->first_S[s]; n < layer->first_S[s + 1]; n++) {
            filled_S[s] -= flow->expert_N[n] == NONE;
        }
    }
    for (int32_t e = 0; e < layer->experts; e++) {
        count_E[e] = replicas(flow, e);
        cross_node += count_cross_node(layer, e);
        if (count_E[e] > 0) {
            rise(heap, size++, falling_key(layer->load_E[e] / (double)count_E[e], e));
        }
    }
    /* Servers only get fuller. */
    double lowest = 0;
    while (size > 0 && open.count > 0) {
        int32_t e = item_of(heap[0]), index = least_full(layer, &open, e, 0, cross_node, filled_S, &lowest);
        if (index == NONE) {
            drop_top(heap, &size);
            continue;
        }
        filled_S[open.server[index]]++;
        cross_node += put_into(layer, &open, index, e, 0);
        replace_top(heap, size, falling_key(layer->load_E[e] / (double)++count_E[e], e));
    }
}
