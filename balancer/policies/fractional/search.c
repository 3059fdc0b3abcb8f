/* State of a search: PAR, excess, and the experts that bound it. */
#include "search.h"

#include <string.h>

/* The mean PAR with the best flow of each scenario. */
double
measure(Search *search)
{
    Layer *layer = search->layer;
    double sum = 0, count = 0;
    for (int32_t b = 0; b < layer->scenarios; b++) {
        search->par_B[b] = 1;
        if (search->mean_B[b] > 0) {
            search->par_B[b] = flow_level(&layer->flow_B[b], EXACT, false) / search->mean_B[b];
            sum += search->par_B[b];
            count++;
        }
    }
    return count > 0 ? sum / count : 1;
}

/* Number of replicas that differ from the initial layout. */
int64_t
count_loads(const Search *search)
{
    const Flow *flow = &search->layer->flow_B[0];
    int64_t loads = 0;
    for (int32_t n = 0; n < flow->slots; n++) {
        loads += flow->expert_N[n] != NONE && flow->expert_N[n] != search->before_N[n];
    }
    return loads;
}

void
save(Search *search)
{
    Layer *layer = search->layer;
    size_t slots = (size_t)layer->flow_B[0].slots, servers = (size_t)layer->servers;
    memcpy(search->saved_N, layer->flow_B[0].expert_N, slots * sizeof(int32_t));
    for (int32_t b = 0; b < layer->scenarios; b++) {
        memcpy(search->saved_BN + (size_t)b * slots, layer->flow_B[b].flow_N, slots * sizeof(double));
        memcpy(search->saved_BS + (size_t)b * servers, layer->flow_B[b].load_S, servers * sizeof(double));
    }
}

void
restore(Search *search)
{
    Layer *layer = search->layer;
    size_t slots = (size_t)layer->flow_B[0].slots, servers = (size_t)layer->servers;
    put_all(layer, search->saved_N);
    for (int32_t b = 0; b < layer->scenarios; b++) {
        Flow *flow = &layer->flow_B[b];
        memcpy(flow->flow_N, search->saved_BN + (size_t)b * slots, slots * sizeof(double));
        memcpy(flow->load_S, search->saved_BS + (size_t)b * servers, servers * sizeof(double));
    }
}

/* Shifts load where possible, and finds the rest. */
void
push(Search *search, double aim)
{
    Layer *layer = search->layer;
    search->excess = 0;
    for (int32_t b = 0; b < layer->scenarios; b++) {
        double level = search->mean_B[b] * (1 + (search->par_B[b] - 1) * aim);
        search->excess_B[b] = search->mean_B[b] > 0 ? flow_push(&layer->flow_B[b], level, EXACT) : 0;
        search->excess += search->excess_B[b] * search->weight_B[b];
    }
}

void
find_bound(Search *search)
{
    Layer *layer = search->layer;
    size_t scenarios = (size_t)layer->scenarios;
    memset(search->bound_EB, 0, scenarios * (size_t)layer->experts * sizeof(double));
    for (size_t b = 0; b < scenarios; b++) {
        const Flow *flow = &layer->flow_B[b];
        for (int32_t s = 0; search->excess_B[b] > 0 && s < layer->servers; s++) {
            for (int32_t n = flow->first_S[s]; flow->level_S[s] != NONE && n < flow->first_S[s + 1]; n++) {
                if (flow->expert_N[n] != NONE) {
                    search->bound_EB[(size_t)flow->expert_N[n] * scenarios + b] += flow->flow_N[n];
                }
            }
        }
    }
    search->bound_count = 0;
    for (int32_t e = 0; e < layer->experts; e++) {
        double sum = 0;
        for (size_t b = 0; b < scenarios; b++) {
            sum += search->bound_EB[(size_t)e * scenarios + b];
        }
        if (sum > 0) {
            search->bound_list[search->bound_count++] = e;
        }
    }
}
