/* A first layout for loads that move together: replicas by risk, the heaviest first to the server with the least.
 *
 * The risk of a server is the mean of its fullness over the iterations, plus RISK standard deviations. It holds the
 * covariance of the server's experts, because the fullness of each iteration is known. Numbers of replicas follow the
 * experts' own risk (Adams' apportionment). What a server holds already counts a little less, which saves loads.
 */
#include <math.h>
#include <string.h>

#include "../native/replicate.h"
#include "together.h"

#define RISK 1.0f
#define KEPT 0.2f           /* part of its load by which a held replica counts less */
#define EVEN 1e-4f
#define MOST_WORK (1 << 26) /* multiplications, about 10 ms */

static float
square_of(const Together *search, const Lanes *values)
{
    Lanes sum = {0};
    for (int32_t t = 0; t < search->vectors; t++) {
        sum += search->weight_T[t] * values[t] * values[t];
    }
    return total(sum);
}

static float
mean_of(const Together *search, const Lanes *values)
{
    Lanes sum = {0};
    for (int32_t t = 0; t < search->vectors; t++) {
        sum += search->weight_T[t] * values[t];
    }
    return total(sum);
}

static float
risk_of(float mean, float square)
{
    float variance = square - mean * mean;
    return mean + RISK * sqrtf(variance > 0 ? variance : 0);
}

/* State of a start; `search` has the servers' fullness. */
typedef struct {
    Together *search;
    float *mean_E, *square_E, *mean_S, *square_S;
    int32_t *free_S, *expert_N;
    int64_t *count_E;
    Entry *order_E, *heap_E;
} Start;

/* The server that is at the least risk with one more replica; NONE: all with a free slot hold the expert. */
WIDE static int32_t
safest(const Start *start, int32_t expert, float share)
{
    const Together *search = start->search;
    const Layer *layer = search->layer;
    const Lanes *load = load_of(search, expert);
    float mean = share * start->mean_E[expert], square = share * share * start->square_E[expert], least = INFINITY;
    int32_t best = NONE;
    for (int32_t s = 0; s < layer->servers; s++) {
        if (start->free_S[s] == 0 || has(search, s, expert)) {
            continue;
        }
        float speed = (float)layer->speed_S[s], sum = start->mean_S[s] + mean / speed;
        float bonus = was_held(search, s, expert) ? KEPT * mean / speed : 0;
        /* The mean is the least risk. */
        if (sum - bonus >= least) {
            continue;
        }
        const Lanes *full = full_of(search, s);
        Lanes both = {0};
        for (int32_t t = 0; t < search->vectors; t++) {
            both += search->weight_T[t] * full[t] * load[t];
        }
        float joint = start->square_S[s] + square / (speed * speed) + 2 * share * total(both) / speed;
        float risk = risk_of(sum, joint) - bonus;
        if (risk < least) {
            least = risk;
            best = s;
        }
    }
    return best;
}

/* False: an expert has no replica, because a number was infinite. */
static bool
place_all(Start *start)
{
    Together *search = start->search;
    const Layer *layer = search->layer;
    for (int32_t i = 0; i < layer->experts; i++) {
        int32_t e = start->order_E[i].item;
        float share = 1 / (float)start->count_E[e];
        for (int64_t k = 0; k < start->count_E[e]; k++) {
            int32_t s = safest(start, e, share);
            if (s == NONE && k == 0) {
                return false;
            }
            if (s == NONE) {
                break;
            }
            add_load(search, s, e, share);
            start->mean_S[s] = mean_of(search, full_of(search, s));
            start->square_S[s] = square_of(search, full_of(search, s));
            search->has_SE[(size_t)s * (size_t)layer->experts + (size_t)e] = 1;
            start->expert_N[layer->first_S[s + 1] - start->free_S[s]--] = e;
        }
    }
    return true;
}

static Start
begin(Together *search)
{
    const Layer *layer = search->layer;
    size_t experts = (size_t)layer->experts, servers = (size_t)layer->servers;
    Start start = {.search = search, .order_E = search->start_block};
    start.heap_E = start.order_E + experts;
    start.count_E = (int64_t *)(start.heap_E + experts);
    start.mean_E = (float *)(start.count_E + experts);
    start.square_E = start.mean_E + experts;
    start.mean_S = start.square_E + experts;
    start.square_S = start.mean_S + servers;
    start.free_S = (int32_t *)(start.square_S + servers);
    start.expert_N = start.free_S + servers;
    return start;
}

/* Experts by slot, in `expert_N`. False: see `place_all`. */
static bool
lay_out(Start *start)
{
    Together *search = start->search;
    Layer *layer = search->layer;
    int32_t usable = 0, slots = layer->first_S[layer->servers];
    for (int32_t s = 0; s < layer->servers; s++) {
        start->free_S[s] = layer->first_S[s + 1] - layer->first_S[s];
        start->mean_S[s] = start->square_S[s] = 0;
        usable += start->free_S[s] > 0;
    }
    double *risk_E = layer->load_BE;
    for (int32_t e = 0; e < layer->experts; e++) {
        start->mean_E[e] = mean_of(search, load_of(search, e));
        start->square_E[e] = square_of(search, load_of(search, e));
        risk_E[e] = risk_of(start->mean_E[e], start->square_E[e]);
    }
    replicate(risk_E, layer->experts, slots - layer->experts, usable, false, start->count_E, NULL, start->heap_E);
    for (int32_t e = 0; e < layer->experts; e++) {
        start->order_E[e] = (Entry){-start->mean_E[e] / (double)start->count_E[e], e};
    }
    sort_entries(start->order_E, start->heap_E, layer->experts);
    memset(search->full_ST, 0, (size_t)layer->servers * (size_t)search->vectors * sizeof(Lanes));
    memset(search->has_SE, 0, (size_t)layer->servers * (size_t)layer->experts);
    memset(start->expert_N, NONE, (size_t)slots * sizeof(int32_t));
    return place_all(start);
}

/* Whether the replicas of each expert have equal shares: then nobody planned them for this. */
static bool
is_even(const Together *search)
{
    const Flow *flow = &search->layer->flow_B[0];
    for (int32_t n = 0; n < flow->slots; n++) {
        if (flow->expert_N[n] != NONE && flow->next_N[n] != NONE &&
            fabsf(search->share_N[n] - search->share_N[flow->next_N[n]]) > EVEN) {
            return false;
        }
    }
    return true;
}

/* Equal shares by default. Returns the number of loads. */
static int64_t
change_to(Together *search, const int32_t *expert_N, const float *share_N)
{
    Flow *flow = &search->layer->flow_B[0];
    for (int32_t n = 0; n < flow->slots; n++) {
        if (flow->expert_N[n] != NONE) {
            flow_take(flow, n);
        }
    }
    int64_t loads = 0;
    for (int32_t n = 0; n < flow->slots; n++) {
        if (expert_N[n] != NONE) {
            flow_put(flow, n, expert_N[n]);
            loads += !was_held(search, flow->server_N[n], expert_N[n]);
        }
    }
    for (int32_t n = 0; n < flow->slots; n++) {
        float even = expert_N[n] == NONE ? 0 : 1 / (float)replicas(flow, expert_N[n]);
        search->share_N[n] = share_N != NULL ? share_N[n] : even;
    }
    return loads;
}

size_t
start_bytes(int32_t servers, int32_t experts, int32_t slots)
{
    size_t s = (size_t)servers, e = (size_t)experts, n = (size_t)slots;
    return e * (2 * sizeof(Entry) + sizeof(int64_t) + 2 * sizeof(float)) +
           s * (2 * sizeof(float) + sizeof(int32_t)) + n * (2 * sizeof(int32_t) + sizeof(float));
}

void
start_together(Together *search)
{
    const Flow *flow = &search->layer->flow_B[0];
    double work = (double)flow->slots * flow->servers * search->vectors * LANES;
    begin_together(search);
    if (work > MOST_WORK || !is_even(search)) {
        level_all(search, FIRST_SWEEPS);
        return;
    }
    Start start = begin(search);
    int32_t *before_N = start.expert_N + flow->slots;
    float *share_N = (float *)(before_N + flow->slots);
    memcpy(before_N, flow->expert_N, (size_t)flow->slots * sizeof(int32_t));
    level_all(search, FIRST_SWEEPS);
    double before = search->value;
    memcpy(share_N, search->share_N, (size_t)flow->slots * sizeof(float));
    bool pays = lay_out(&start);
    if (pays) {
        int64_t loads = change_to(search, start.expert_N, NULL);
        begin_together(search);
        level_all(search, FIRST_SWEEPS);
        pays = search->value + search->price * (double)loads < before;
    }
    if (!pays) {
        change_to(search, before_N, share_N);
        begin_together(search);
    }
}
