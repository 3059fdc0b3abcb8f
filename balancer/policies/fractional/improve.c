/* Exchanges experts while that pays, in stages, each with a target load. */
#include "search.h"

#include <string.h>

/* A stage removes the excess above this part of the way from the mean to the current peak; if the first target does
 * not pay, the second is closer to the peak. */
static const double AIMS[] = {0.5, 0.85};
#define SETBACKS 3 /* rounds of a stage that may fail to lower the excess */

/* Exchanges until nothing is above the target, or until that clearly does not pay: a stage lowers the PAR by at most
 * `most`. Returns the number of additional loads. */
static int64_t
run_stage(Search *search, double aim, double most)
{
    double price = search->layer->price, first;
    int64_t before_all = count_loads(search);
    int32_t setbacks = 0;
    /* Load is shifted only after a round of exchanges, as shifting takes most of the time. */
    int32_t round = 4 + search->layer->servers / 8;
    search->exchanges = 0;
    push(search, aim);
    first = search->excess;
    while (search->excess > EXACT && setbacks < SETBACKS && search->exchanges < search->layer->flow_B[0].slots &&
           search->rounds_left-- > 0) {
        double before = search->excess;
        int64_t exchanges = search->exchanges;
        find_bound(search);
        find_places(search);
        for (int32_t i = 0; i < round && search->excess > EXACT && replicate_one(search); i++) {
        }
        if (search->exchanges == exchanges && !swap_one(search)) {
            break;
        }
        push(search, aim);
        setbacks += !(search->excess < before * (1 - WORTH));
        /* At this pace. */
        double done = first > search->excess ? 1 - search->excess / first : 0;
        if (price * (double)(count_loads(search) - before_all) > most * (done < 0.25 ? 0.5 : 2 * done)) {
            break;
        }
    }
    return count_loads(search) - before_all;
}

static void
start_flows(Search *search)
{
    Layer *layer = search->layer;
    Flow *first = &layer->flow_B[0];
    make_shares(first);
    /* The first scenario holds the shares, and is overwritten last. */
    for (int32_t e = 0; e < layer->experts; e++) {
        for (int32_t n = first->head_E[e]; n != NONE; n = first->next_N[n]) {
            double share = first->flow_N[n];
            for (int32_t b = layer->scenarios - 1; b >= 0; b--) {
                layer->flow_B[b].flow_N[n] = share * layer->load_BE[(size_t)b * (size_t)layer->experts + (size_t)e];
            }
        }
        search->cross_node += count_cross_node(layer, e);
    }
    for (int32_t b = 0; b < layer->scenarios; b++) {
        Flow *flow = &layer->flow_B[b];
        double total = 0;
        for (int32_t s = 0; s < layer->servers; s++) {
            flow->load_S[s] = 0;
            for (int32_t n = flow->first_S[s]; n < flow->first_S[s + 1]; n++) {
                flow->load_S[s] += flow->expert_N[n] == NONE ? 0 : flow->flow_N[n];
            }
            total += flow->load_S[s];
        }
        search->mean_B[b] = total / layer->speed;
        search->weight_B[b] = total > 0 ? 1 / total : 0;
    }
}

static Search
place_arrays(Layer *layer, Arena *arena, size_t slots)
{
    size_t scenarios = (size_t)layer->scenarios, experts = (size_t)layer->experts;
    Search search = {.layer = layer};
    double **by_scenario[] = {&search.weight_B, &search.mean_B, &search.par_B, &search.excess_B, &search.most_B};
    for (size_t i = 0; i < sizeof(by_scenario) / sizeof(*by_scenario); i++) {
        *by_scenario[i] = carve(arena, scenarios, sizeof(double));
    }
    search.net_N = carve(arena, slots, sizeof(double));
    search.bound_EB = carve(arena, scenarios * experts, sizeof(double));
    search.spare_EB = carve(arena, scenarios * experts, sizeof(double));
    search.saved_BN = carve(arena, scenarios * slots, sizeof(double));
    search.saved_BS = carve(arena, scenarios * (size_t)layer->servers, sizeof(double));
    search.saved_N = carve(arena, slots, sizeof(int32_t));
    search.before_N = carve(arena, slots, sizeof(int32_t));
    search.heap = carve(arena, slots, sizeof(int32_t));
    search.bound_list = carve(arena, experts, sizeof(int32_t));
    return search;
}

size_t
improve_bytes(const Layer *layer, int32_t slots)
{
    Arena arena = {0};
    Layer copy = *layer;
    place_arrays(&copy, &arena, (size_t)slots);
    return arena.used;
}

double
improve(Layer *layer, int32_t rounds)
{
    size_t slots = (size_t)layer->flow_B[0].slots;
    Arena arena = {.block = layer->scratch};
    Search search = place_arrays(layer, &arena, slots);
    search.rounds_left = rounds;
    memcpy(search.before_N, layer->flow_B[0].expert_N, slots * sizeof(int32_t));
    start_flows(&search);
    double par = measure(&search);
    size_t aim = 0;
    while (aim < sizeof(AIMS) / sizeof(AIMS[0]) && par - 1 > layer->price + EXACT && search.rounds_left > 0) {
        int64_t cross_node = search.cross_node;
        save(&search);
        int64_t loads = run_stage(&search, AIMS[aim], (par - 1) * (1 - AIMS[aim]));
        double now = search.exchanges > 0 ? measure(&search) : par;
        if (par - now > layer->price * (double)loads + EXACT) {
            par = now;
            aim = 0;
            continue;
        }
        restore(&search);
        measure(&search);
        search.cross_node = cross_node;
        aim++;
    }
    return par;
}
