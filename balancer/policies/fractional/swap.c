/* Swaps two experts. */
#include "search.h"

static int32_t
fullest(const Search *search)
{
    const Layer *layer = search->layer;
    int32_t worst = NONE;
    double worst_excess = 0;
    for (int32_t s = 0; s < layer->servers; s++) {
        double excess = 0;
        for (int32_t b = 0; b < layer->scenarios; b++) {
            const Flow *flow = &layer->flow_B[b];
            if (search->excess_B[b] > 0 && flow->level_S[s] == 0) {
                excess -= flow->room_S[s] * search->weight_B[b];
            }
        }
        if (excess > worst_excess) {
            worst_excess = excess;
            worst = s;
        }
    }
    return worst;
}

/* The change of the excess if the flows of two slots (NONE: of an empty one) changed places. */
static double
gain_of_swap(const Search *search, int32_t from, int32_t to)
{
    const Layer *layer = search->layer;
    double gain = 0;
    for (int32_t b = 0; b < layer->scenarios; b++) {
        const Flow *flow = &layer->flow_B[b];
        if (!(search->mean_B[b] > 0)) {
            continue;
        }
        double shift = flow->flow_N[from] - (flow->expert_N[to] == NONE ? 0 : flow->flow_N[to]);
        double over = -flow->room_S[flow->server_N[from]], room = flow->room_S[flow->server_N[to]];
        double before = (over > 0 ? over : 0) + (room < 0 ? -room : 0);
        double after = (over - shift > 0 ? over - shift : 0) + (shift - room > 0 ? shift - room : 0);
        gain += (before - after) * search->weight_B[b];
    }
    return gain;
}

bool
swap_one(Search *search)
{
    Layer *layer = search->layer;
    const Flow *flow = &layer->flow_B[0];
    int32_t source = fullest(search), best_from = NONE, best_to = NONE;
    double best_gain = WORTH * search->excess;
    if (source == NONE) {
        return false;
    }
    for (int32_t to = 0; to < flow->slots; to++) {
        int32_t target = flow->server_N[to], other = flow->expert_N[to];
        if (target == source || (other != NONE && holds(flow, source, other))) {
            continue;
        }
        for (int32_t from = flow->first_S[source]; from < flow->first_S[source + 1]; from++) {
            int32_t expert = flow->expert_N[from];
            if (expert == NONE) {
                continue;
            }
            double gain = gain_of_swap(search, from, to);
            if (gain > best_gain && !holds(flow, target, expert) &&
                (layer->node_S == NULL || layer->node_S[source] == layer->node_S[target])) {
                best_gain = gain;
                best_from = from;
                best_to = to;
            }
        }
    }
    if (best_from == NONE) {
        return false;
    }
    for (int32_t b = 0; b < layer->scenarios; b++) {
        Flow *each = &layer->flow_B[b];
        int32_t expert = each->expert_N[best_from], other = each->expert_N[best_to];
        double flow_there = other == NONE ? 0 : each->flow_N[best_to], flow_here = each->flow_N[best_from];
        flow_take(each, best_from);
        if (other != NONE) {
            flow_take(each, best_to);
            flow_put(each, best_from, other);
            each->flow_N[best_from] = flow_there;
        }
        flow_put(each, best_to, expert);
        each->flow_N[best_to] = flow_here;
        each->load_S[source] += flow_there - flow_here;
        each->load_S[each->server_N[best_to]] += flow_here - flow_there;
    }
    search->exchanges++;
    return true;
}
