/* A first layout for loads that move together: replicas by risk, the heaviest first to the server with the least.
 *
 * The risk of a server is the mean of its fullness over the iterations, plus RISK standard deviations. It holds the
 * covariance of the server's experts, because the fullness of each iteration is known. Numbers of replicas follow the
 * experts' mean load plus PEAK standard deviations (Adams' apportionment).
 *
 * Three things save loads: what a server holds already counts less; servers that are alike change places so that many
 * hold what they are to hold; and swaps give servers back what they held, where the objective is about as low then.
 */
#include <math.h>
#include <string.h>

#include "../native/replicate.h"
#include "together.h"

#define RISK 2.5f
#define PEAK 1.5f
#define KEPT 0.4f           /* part of its load by which a held replica counts less */
#define ENOUGH 8            /* vectors of iterations, for a start */
#define MOST_WORK (1 << 26) /* multiplications, about 10 ms */

/* Half of them are enough, if there are many: of every four iterations the third and the fourth. */
static int32_t
first_vectors(int32_t vectors)
{
    return vectors > ENOUGH ? vectors / 2 : vectors;
}

static int32_t
columns_of(int32_t servers)
{
    return (servers + BLOCK * LANES - 1) / (BLOCK * LANES) * BLOCK;
}

void
place_start(Together *search, Arena *arena, size_t slots)
{
    Start *start = &search->start;
    size_t experts = (size_t)search->layer->experts, servers = (size_t)search->layer->servers;
    *start = (Start){.search = search};
    if ((double)slots * (double)servers * search->vectors * LANES > MOST_WORK) {
        return;
    }
    start->vectors = first_vectors(search->vectors);
    start->columns = columns_of(search->layer->servers);
    start->full_TV = carve(arena, (size_t)start->columns * (size_t)start->vectors * LANES, sizeof(Lanes));
    Lanes **by_column[] = {&start->mean_V, &start->variance_V, &start->pace_V,
                           &start->cost_V, &start->block_V,    &start->then_V};
    for (size_t i = 0; i < sizeof(by_column) / sizeof(*by_column); i++) {
        *by_column[i] = carve(arena, (size_t)start->columns, sizeof(Lanes));
    }
    start->order_E = carve(arena, experts, sizeof(uint64_t));
    start->heap_E = carve(arena, experts, sizeof(uint64_t));
    start->count_E = carve(arena, experts, sizeof(int64_t));
    start->mean_E = carve(arena, experts, sizeof(float));
    start->variance_E = carve(arena, experts, sizeof(float));
    start->free_S = carve(arena, servers, sizeof(int32_t));
    start->place_S = carve(arena, servers, sizeof(int32_t));
    start->taken_S = carve(arena, servers, sizeof(int32_t));
    start->common_SS = carve(arena, servers * servers, sizeof(int32_t));
    start->expert_N = carve(arena, slots, sizeof(int32_t));
    start->moved_N = carve(arena, slots, sizeof(int32_t));
    start->before_N = carve(arena, slots, sizeof(int32_t));
    start->share_N = carve(arena, slots, sizeof(float));
}

/* Mean and variance of an expert's load. Iterations without weight have no load. */
WIDE static void
measure_expert(Start *start, int32_t expert)
{
    const Lanes *load = load_of(start->search, expert);
    Lanes sum = {0}, squares = {0};
    for (int32_t t = 0; t < start->vectors; t++) {
        sum += load[t];
        squares += load[t] * load[t];
    }
    float mean = total(sum) * start->weight, variance = total(squares) * start->weight - mean * mean;
    start->mean_E[expert] = mean;
    start->variance_E[expert] = variance > 0 ? variance : 0;
}

/* The server that is at the least risk with one more replica, a part of an expert; NONE: all with a free slot hold it. */
WIDE static int32_t
safest(const Start *start, int32_t expert, float share)
{
    const float *load = (const float *)load_of(start->search, expert);
    int32_t columns = start->columns;
    float mean = start->mean_E[expert], variance = share * share * start->variance_E[expert];
    for (int32_t v = 0; v < columns; v += BLOCK) {
        Lanes sum[BLOCK] = {{0}};
        const Lanes *full = start->full_TV + v;
        for (int32_t t = 0; t < start->vectors * LANES; t++) {
            for (int32_t i = 0; i < BLOCK; i++) {
                sum[i] += full[t * columns + i] * load[t];
            }
        }
        for (int32_t i = v; i < v + BLOCK; i++) {
            Lanes covariance = sum[i - v] * start->weight - start->mean_V[i] * mean, pace = start->pace_V[i];
            start->then_V[i] = start->variance_V[i] + pace * (variance * pace + 2 * share * covariance);
        }
    }
    const float *then_S = (const float *)start->then_V, *mean_S = (const float *)start->mean_V;
    const float *pace_S = (const float *)start->pace_V, *cost_S = (const float *)start->cost_V;
    const float *block_S = (const float *)start->block_V;
    float least = INFINITY;
    int32_t best = NONE;
    for (int32_t s = 0; s < start->search->layer->servers; s++) {
        float deviation = sqrtf(then_S[s] > 0 ? then_S[s] : 0);
        float risk = mean_S[s] + share * mean * cost_S[s] * pace_S[s] + RISK * deviation + block_S[s];
        best = risk < least ? s : best;
        least = risk < least ? risk : least;
    }
    return best;
}

static void
add_replica(Start *start, int32_t server, int32_t expert, float share)
{
    const float *load = (const float *)load_of(start->search, expert);
    float *full_TS = (float *)start->full_TV + server, part = share * ((float *)start->pace_V)[server];
    for (int32_t t = 0; t < start->vectors * LANES; t++) {
        full_TS[t * start->columns * LANES] += part * load[t];
    }
    float variance = ((float *)start->then_V)[server];
    ((float *)start->mean_V)[server] += part * start->mean_E[expert];
    ((float *)start->variance_V)[server] = variance > 0 ? variance : 0;
    ((float *)start->block_V)[server] = INFINITY;
    int32_t end = start->search->layer->first_S[server + 1];
    start->expert_N[end - start->free_S[server]--] = expert;
}

/* False: an expert has no replica, because a number was infinite. */
static bool
place_all(Start *start)
{
    Together *search = start->search;
    const Layer *layer = search->layer;
    for (int32_t i = 0; i < layer->experts; i++) {
        int32_t e = item_of(start->order_E[i]);
        float share = 1 / (float)start->count_E[e];
        for (int32_t s = 0; s < layer->servers; s++) {
            ((float *)start->cost_V)[s] = was_held(search, s, e) ? 1 - KEPT : 1;
            ((float *)start->block_V)[s] = start->free_S[s] > 0 ? 0 : INFINITY;
        }
        for (int64_t k = 0; k < start->count_E[e]; k++) {
            int32_t s = safest(start, e, share);
            if (s == NONE && k == 0) {
                return false;
            }
            if (s == NONE) {
                break;
            }
            add_replica(start, s, e, share);
        }
    }
    return true;
}

/* Experts by slot, in `expert_N`. False: see `place_all`. */
static bool
lay_out(Start *start)
{
    Together *search = start->search;
    Layer *layer = search->layer;
    int32_t usable = 0, slots = layer->first_S[layer->servers];
    size_t columns = (size_t)start->columns;
    float weight = 0;
    for (int32_t t = 0; t < start->vectors; t++) {
        weight += total(search->weight_T[t]);
    }
    start->weight = search->weight_T[0][0] / weight;
    memset(start->full_TV, 0, columns * (size_t)start->vectors * LANES * sizeof(Lanes));
    memset(start->mean_V, 0, columns * sizeof(Lanes));
    memset(start->variance_V, 0, columns * sizeof(Lanes));
    memset(start->pace_V, 0, columns * sizeof(Lanes));
    for (int32_t s = 0; s < layer->servers; s++) {
        start->free_S[s] = layer->first_S[s + 1] - layer->first_S[s];
        ((float *)start->pace_V)[s] = 1 / (float)layer->speed_S[s];
        usable += start->free_S[s] > 0;
    }
    double *risk_E = layer->load_BE;
    for (int32_t e = 0; e < layer->experts; e++) {
        measure_expert(start, e);
        risk_E[e] = start->mean_E[e] + PEAK * sqrtf(start->variance_E[e]);
    }
    replicate(risk_E, layer->experts, slots - layer->experts, usable, false, start->count_E, NULL, start->heap_E);
    for (int32_t e = 0; e < layer->experts; e++) {
        start->order_E[e] = falling_key(start->mean_E[e] / (double)start->count_E[e], e);
    }
    sort_keys(start->order_E, start->heap_E, layer->experts);
    memset(start->expert_N, NONE, (size_t)slots * sizeof(int32_t));
    return place_all(start);
}

static bool
alike(const Layer *layer, int32_t a, int32_t b)
{
    int32_t one = layer->first_S[a + 1] - layer->first_S[a], two = layer->first_S[b + 1] - layer->first_S[b];
    return one == two && layer->speed_S[a] == layer->speed_S[b];
}

/* Servers that are alike change places, so that many hold what they are to hold: those with the most in common first. */
static void
match(Start *start)
{
    const Together *search = start->search;
    const Layer *layer = search->layer;
    const Flow *flow = &layer->flow_B[0];
    int32_t servers = layer->servers, most = 0;
    memset(start->common_SS, 0, (size_t)servers * (size_t)servers * sizeof(*start->common_SS));
    for (int32_t s = 0; s < servers; s++) {
        start->place_S[s] = start->taken_S[s] = NONE;
        for (int32_t n = layer->first_S[s]; n < layer->first_S[s + 1]; n++) {
            int32_t e = start->expert_N[n];
            for (int32_t m = e == NONE ? NONE : flow->head_E[e]; m != NONE; m = flow->next_N[m]) {
                if (was_held(search, flow->server_N[m], e)) {
                    int32_t *common = start->common_SS + s * servers + flow->server_N[m];
                    most = ++*common > most ? *common : most;
                }
            }
        }
    }
    /* Those with nothing in common last. */
    for (int32_t common = most; common >= 0; common--) {
        for (int32_t s = 0; s < servers; s++) {
            for (int32_t to = 0; start->place_S[s] == NONE && to < servers; to++) {
                if (start->common_SS[s * servers + to] == common && start->taken_S[to] == NONE && alike(layer, s, to)) {
                    start->place_S[s] = to;
                    start->taken_S[to] = s;
                }
            }
        }
    }
    memcpy(start->moved_N, start->expert_N, (size_t)flow->slots * sizeof(int32_t));
    for (int32_t s = 0; s < servers; s++) {
        int32_t first = layer->first_S[s], size = layer->first_S[s + 1] - first;
        memcpy(start->expert_N + layer->first_S[start->place_S[s]], start->moved_N + first,
               (size_t)size * sizeof(int32_t));
    }
}

/* Replicas that servers did not hold before. */
static int64_t
count_new(const Together *search)
{
    const Flow *flow = &search->layer->flow_B[0];
    int64_t loads = 0;
    for (int32_t n = 0; n < flow->slots; n++) {
        loads += flow->expert_N[n] != NONE && !was_held(search, flow->server_N[n], flow->expert_N[n]);
    }
    return loads;
}

/* Equal shares by default. */
static void
change_to(Together *search, const int32_t *expert_N, const float *share_N)
{
    const Flow *flow = &search->layer->flow_B[0];
    put_all(search->layer, expert_N);
    for (int32_t n = 0; n < flow->slots; n++) {
        float even = expert_N[n] == NONE ? 0 : 1 / (float)replicas(flow, expert_N[n]);
        search->share_N[n] = share_N != NULL ? share_N[n] : even;
    }
}

void
start_together(Together *search)
{
    const Flow *flow = &search->layer->flow_B[0];
    Start *start = &search->start;
    begin_together(search);
    level_all(search, FIRST_SWEEPS);
    if (start->full_TV == NULL) {
        return;
    }
    memcpy(start->before_N, flow->expert_N, (size_t)flow->slots * sizeof(int32_t));
    memcpy(start->share_N, search->share_N, (size_t)flow->slots * sizeof(float));
    double price = search->anew * search->price, before = search->value + price * (double)count_new(search);
    bool pays = lay_out(start);
    if (pays) {
        match(start);
        change_to(search, start->expert_N, NULL);
        begin_together(search);
        level_all(search, FIRST_SWEEPS);
        return_all(search);
        pays = search->value + price * (double)count_new(search) < before;
    }
    if (!pays) {
        change_to(search, start->before_N, start->share_N);
        begin_together(search);
    }
}
