/* Plans all layers: arrays in, one of two searches for each layer, arrays out. */
#include <stdlib.h>

#include "../native/export.h"
#include "../native/keys.h"
#include "../native/sparse.h"
#include "together.h"

/* A PAR this close to 1 gets few rounds. */
#define LITTLE 0.005
#define FEW_ROUNDS 4

#define MOST_SCENARIOS 4096

/* The most slots of a layer, or -1 if a layer's do not suffice, a server has more than E, or all have more than
 * there is room for in the result. */
static int64_t
count_slots(const int64_t *slots_LS, ptrdiff_t layers, ptrdiff_t servers, ptrdiff_t experts, ptrdiff_t room)
{
    int64_t most = 0, total = 0;
    for (ptrdiff_t l = 0; l < layers; l++) {
        int64_t slots = 0;
        for (ptrdiff_t s = 0; s < servers; s++) {
            int64_t own = slots_LS[l * servers + s];
            if (own < 0 || own > experts) {
                return -1;
            }
            slots += own;
        }
        if (slots < experts) {
            return -1;
        }
        most = slots > most ? slots : most;
        total += slots;
    }
    return total <= room ? most : -1;
}

/* Writes a layer's rows behind `at`, each server's experts ascending; returns the end. The shares are raised to
 * LEAST_SHARE and scaled to the sum 1, in place. */
static int64_t
write_rows(const Flow *flow, double *share_N, int64_t at, int64_t *end_S, int32_t *expert, double *share)
{
    for (int32_t e = 0; e < flow->experts; e++) {
        double sum = 0;
        for (int32_t n = flow->head_E[e]; n != NONE; n = flow->next_N[n]) {
            share_N[n] = share_N[n] > LEAST_SHARE ? share_N[n] : LEAST_SHARE;
            sum += share_N[n];
        }
        for (int32_t n = flow->head_E[e]; n != NONE; n = flow->next_N[n]) {
            share_N[n] /= sum;
        }
    }
    for (int32_t s = 0; s < flow->servers; s++) {
        int64_t begin = at;
        for (int32_t n = flow->first_S[s]; n < flow->first_S[s + 1]; n++) {
            if (flow->expert_N[n] == NONE) {
                continue;
            }
            int64_t i = at++;
            for (; i > begin && expert[i - 1] > flow->expert_N[n]; i--) {
                expert[i] = expert[i - 1];
                share[i] = share[i - 1];
            }
            expert[i] = flow->expert_N[n];
            share[i] = share_N[n];
        }
        end_S[s] = at;
    }
    return at;
}

static size_t
scratch_bytes(const Layer *layer, int32_t slots)
{
    size_t of_step[] = {fill_bytes(layer, slots), one_by_one_bytes(layer), improve_bytes(layer, slots)}, most = 0;
    for (size_t i = 0; i < sizeof(of_step) / sizeof(*of_step); i++) {
        most = of_step[i] > most ? of_step[i] : most;
    }
    return most;
}

/* Empty slots. */
static void
begin_layer(Layer *layer, const int64_t *slots_S, int32_t *first_S, char *flows, size_t flow_size)
{
    first_S[0] = 0;
    for (int32_t s = 0; s < layer->servers; s++) {
        first_S[s + 1] = first_S[s] + (int32_t)slots_S[s];
    }
    for (int32_t b = 0; b < layer->scenarios; b++) {
        flow_init(&layer->flow_B[b], flows + (size_t)b * flow_size, layer->servers, layer->experts, first_S,
                  layer->speed_S);
    }
}

/* Plans for scenarios. `load` is the layer's in the first one; that of the next is `stride` further on. Returns shares:
 * means over the scenarios' flows. */
static double *
plan_scenarios(Layer *layer, const Held *held, const double *load, size_t stride)
{
    size_t scenarios = (size_t)layer->scenarios, experts = (size_t)layer->experts;
    int32_t rounds = INT32_MAX;
    for (size_t e = 0; e < experts; e++) {
        layer->load_E[e] = 0;
        for (size_t b = 0; b < scenarios; b++) {
            layer->load_BE[b * experts + e] = load[b * stride + e];
            layer->load_E[e] += load[b * stride + e] / (double)scenarios;
        }
    }
    begin_slots(layer, held);
    if (held->first_S != NULL && layer->scenarios == 1 && layer->node_S == NULL && refill(layer) < LITTLE) {
        rounds = FEW_ROUNDS;
    }
    limit_abroad(layer);
    improve(layer, rounds);
    const Flow *first = &layer->flow_B[0];
    double *share_N = (double *)layer->scratch;
    for (int32_t b = 0; b < layer->scenarios; b++) {
        flow_level(&layer->flow_B[b], 1e-9, true);
    }
    for (int32_t n = 0; n < first->slots; n++) {
        int32_t e = first->expert_N[n];
        double part = 0;
        for (int32_t b = 0; e != NONE && b < layer->scenarios; b++) {
            part += layer->flow_B[b].flow_N[n];
        }
        share_N[n] = e == NONE ? 0 : layer->load_E[e] > 0 ? part / (layer->load_E[e] * layer->scenarios) : 1;
    }
    return share_N;
}

/* A sparse layout (first_X, expert_N, share_N: see native/sparse.h; N is the number of slots) for slots (L, S, E at
 * most each) and either loads of scenarios (B, L, E) or those of iterations (L, T, E; the other is NULL). A current
 * layout has the same form (NULL: nothing is held), with its shares (NULL: not known). `node_S`, `most_cross_node`,
 * `price`: see `Layer`; `anew`: see `Together`. Iterations know no nodes. */
EXPORT int
plan_fractional(const double *load_BLE, const float *load_LTE, const int64_t *slots_LS, const double *speed_S,
                const int64_t *now_X, const int32_t *now_M, const double *now_share_M, const int32_t *node_S,
                int64_t most_cross_node, double price, double anew, int64_t *first_X, int32_t *expert_N,
                double *share_N, ptrdiff_t scenarios, ptrdiff_t layers, ptrdiff_t iterations, ptrdiff_t servers,
                ptrdiff_t experts, ptrdiff_t ends, ptrdiff_t held_size, ptrdiff_t room)
{
    ptrdiff_t flows = load_LTE != NULL ? 1 : scenarios;
    if (flows < 1 || (scenarios > 0) == (iterations > 0) || servers < 1 || experts < 1 ||
        ends != layers * servers + 1) {
        return OUT_OF_RANGE;
    }
    if (now_X != NULL && (now_M == NULL || !rows_fit(now_X, ends, now_M, held_size, experts))) {
        return OUT_OF_RANGE;
    }
    if (experts > MOST_ITEMS || servers > INT32_MAX / 16 / experts || scenarios > MOST_SCENARIOS ||
        iterations > INT32_MAX / 16 / experts) {
        return TOO_MANY;
    }
    int32_t b = (int32_t)flows, s = (int32_t)servers, e = (int32_t)experts, t = (int32_t)iterations;
    int32_t slots = (int32_t)count_slots(slots_LS, layers, servers, experts, room), nodes = 0, most = 0;
    for (int32_t i = 0; node_S != NULL && i < s; i++) {
        if (node_S[i] < 0 || t > 0) {
            return OUT_OF_RANGE;
        }
        nodes = node_S[i] >= nodes ? node_S[i] + 1 : nodes;
    }
    if (slots < 0) {
        return OUT_OF_RANGE;
    }
    for (ptrdiff_t i = 0; i < layers * servers; i++) {
        most = slots_LS[i] > most ? (int32_t)slots_LS[i] : most;
    }
    Layer layer = {.scenarios = b, .servers = s, .experts = e, .speed_S = speed_S, .node_S = node_S, .nodes = nodes};
    for (int32_t i = 0; i < s; i++) {
        layer.speed += speed_S[i];
    }
    size_t flow_size = (flow_bytes(s, e, slots) + 63) / 64 * 64;
    int32_t *first_S = malloc(((size_t)servers + 1) * sizeof(*first_S));
    char *flow_block = malloc((size_t)b * flow_size);
    Together search = {.layer = &layer, .price = price, .anew = anew};
    void *block = t == 0 ? NULL : begin_search(&search, t, slots, most);
    layer.first_S = first_S;
    layer.most_cross_node = most_cross_node;
    layer.price = price;
    layer.load_BE = malloc((size_t)b * (size_t)e * sizeof(double));
    layer.load_E = malloc((size_t)e * sizeof(double));
    layer.flow_B = malloc((size_t)b * sizeof(Flow));
    layer.scratch = aligned_alloc(ALIGNMENT, scratch_bytes(&layer, slots));
    void *blocks[] = {first_S, flow_block, layer.load_BE, layer.load_E, layer.flow_B, layer.scratch, block};
    size_t count = sizeof(blocks) / sizeof(*blocks) - (t == 0);
    bool fits = true;
    for (size_t i = 0; i < count; i++) {
        fits &= blocks[i] != NULL;
    }
    int64_t at = 0;
    first_X[0] = 0;
    for (ptrdiff_t l = 0; fits && l < layers; l++) {
        Held held = {.first_S = now_X == NULL ? NULL : now_X + l * servers, .expert = now_M, .share = now_share_M};
        begin_layer(&layer, slots_LS + l * servers, first_S, flow_block, flow_size);
        double *found_N = t > 0 ? plan_iterations(&search, &held, load_LTE + l * iterations * experts)
                                : plan_scenarios(&layer, &held, load_BLE + l * experts, (size_t)(layers * experts));
        at = write_rows(&layer.flow_B[0], found_N, at, first_X + l * servers + 1, expert_N, share_N);
    }
    for (size_t i = 0; i < count; i++) {
        free(blocks[i]);
    }
    return fits ? DONE : NO_MEMORY;
}
