/* Plans all layers: arrays in, `layer.h` for each layer, arrays out. */
#include <stdlib.h>

#include "../native/export.h"
#include "layer.h"

/* A PAR this close to 1 gets few rounds. */
#define LITTLE 0.005
#define FEW_ROUNDS 4

#define MOST_SCENARIOS 4096

/* `load` is the layer's in the first scenario; that of the next is `stride` further on. */
static void
begin_layer(Layer *layer, const double *load, size_t stride, const int64_t *slots_S, int32_t *first_S, char *flows,
            size_t flow_size)
{
    size_t scenarios = (size_t)layer->scenarios, experts = (size_t)layer->experts;
    int32_t slots = 0;
    for (int32_t s = 0; s < layer->servers; s++) {
        first_S[s] = slots;
        slots += (int32_t)slots_S[s];
    }
    first_S[layer->servers] = slots;
    for (size_t e = 0; e < experts; e++) {
        layer->load_E[e] = 0;
        for (size_t b = 0; b < scenarios; b++) {
            layer->load_BE[b * experts + e] = load[b * stride + e];
            layer->load_E[e] += load[b * stride + e] / (double)scenarios;
        }
    }
    for (size_t b = 0; b < scenarios; b++) {
        flow_init(&layer->flow_B[b], flows + b * flow_size, layer->servers, layer->experts, first_S, layer->speed_S);
    }
}

static void
plan_layer(Layer *layer, const uint8_t *current_SE, const double *now_SE)
{
    int32_t rounds = INT32_MAX;
    if (current_SE != NULL) {
        keep(layer, current_SE, now_SE);
        if (layer->scenarios == 1 && layer->node_S == NULL && refill(layer) < LITTLE) {
            rounds = FEW_ROUNDS;
        }
    } else {
        fill(layer);
    }
    limit_abroad(layer);
    improve(layer, rounds);
    for (int32_t b = 0; b < layer->scenarios; b++) {
        flow_level(&layer->flow_B[b], 1e-9, true);
    }
}

/* Shares are means over the scenarios' flows. */
static void
write_layer(const Layer *layer, uint8_t *holds_SE, double *shares_SE)
{
    const Flow *first = &layer->flow_B[0];
    double *share_N = layer->scratch;
    for (int32_t n = 0; n < first->slots; n++) {
        int32_t e = first->expert_N[n];
        double part = 0;
        for (int32_t b = 0; e != NONE && b < layer->scenarios; b++) {
            part += layer->flow_B[b].flow_N[n];
        }
        share_N[n] = e == NONE ? 0 : layer->load_E[e] > 0 ? part / (layer->load_E[e] * layer->scenarios) : 1;
    }
    for (int32_t e = 0; e < layer->experts; e++) {
        double sum = 0;
        for (int32_t n = first->head_E[e]; n != NONE; n = first->next_N[n]) {
            share_N[n] = share_N[n] > LEAST_SHARE ? share_N[n] : LEAST_SHARE;
            sum += share_N[n];
        }
        for (int32_t n = first->head_E[e]; n != NONE; n = first->next_N[n]) {
            ptrdiff_t at = (ptrdiff_t)first->server_N[n] * layer->experts + e;
            holds_SE[at] = 1;
            shares_SE[at] = share_N[n] / sum;
        }
    }
}

/* The most slots of a layer, or -1 if a layer's do not suffice or a server has more than E. */
static int64_t
count_slots(const int64_t *slots_LS, ptrdiff_t layers, ptrdiff_t servers, ptrdiff_t experts)
{
    int64_t most = 0;
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
    }
    return most;
}

/* A layout (holds and shares, L x S x E, zeroed) for loads (B, L, E) and slots (L, S, E at most each), from a current
 * one (NULL: nothing is held) and its shares (NULL: not known). `node_S`, `most_cross_node`, `price`: see `Layer`. */
EXPORT int
plan_fractional(const double *load_BLE, const int64_t *slots_LS, const double *speed_S, const uint8_t *current_LSE,
                const double *now_LSE, const int32_t *node_S, int64_t most_cross_node, double price,
                uint8_t *holds_LSE, double *shares_LSE, ptrdiff_t scenarios, ptrdiff_t layers, ptrdiff_t servers,
                ptrdiff_t experts)
{
    if (scenarios < 1 || servers < 1 || experts < 1) {
        return OUT_OF_RANGE;
    }
    if (servers > INT32_MAX / 16 / experts || scenarios > MOST_SCENARIOS) {
        return TOO_MANY;
    }
    int32_t b = (int32_t)scenarios, s = (int32_t)servers, e = (int32_t)experts, nodes = 0;
    int32_t most_slots = (int32_t)count_slots(slots_LS, layers, servers, experts);
    for (int32_t i = 0; node_S != NULL && i < s; i++) {
        if (node_S[i] < 0) {
            return OUT_OF_RANGE;
        }
        nodes = node_S[i] >= nodes ? node_S[i] + 1 : nodes;
    }
    if (most_slots < 0) {
        return OUT_OF_RANGE;
    }
    size_t flow_size = (flow_bytes(s, e, most_slots) + 63) / 64 * 64;
    int32_t *first_S = malloc(((size_t)servers + 1) * sizeof(*first_S));
    char *flows = malloc((size_t)scenarios * flow_size);
    Layer layer = {.scenarios = b, .servers = s, .experts = e, .first_S = first_S, .speed_S = speed_S, .price = price};
    layer.node_S = node_S;
    layer.nodes = nodes;
    layer.most_cross_node = most_cross_node;
    layer.load_BE = malloc((size_t)(scenarios * experts) * sizeof(double));
    layer.load_E = malloc((size_t)experts * sizeof(double));
    layer.flow_B = malloc((size_t)scenarios * sizeof(Flow));
    layer.scratch = malloc(scratch_doubles(b, s, e, most_slots) * sizeof(double));
    layer.counts = malloc(scratch_counts(s, e, most_slots) * sizeof(int32_t));
    bool fits = first_S && flows && layer.load_BE && layer.load_E && layer.flow_B && layer.scratch && layer.counts;
    for (ptrdiff_t l = 0; fits && l < layers; l++) {
        ptrdiff_t at = l * servers * experts;
        begin_layer(&layer, load_BLE + l * experts, (size_t)(layers * experts), slots_LS + l * servers, first_S, flows,
                    flow_size);
        plan_layer(&layer, current_LSE == NULL ? NULL : current_LSE + at, now_LSE == NULL ? NULL : now_LSE + at);
        write_layer(&layer, holds_LSE + at, shares_LSE + at);
    }
    void *blocks[] = {first_S, flows, layer.load_BE, layer.load_E, layer.flow_B, layer.scratch, layer.counts};
    for (size_t i = 0; i < sizeof(blocks) / sizeof(*blocks); i++) {
        free(blocks[i]);
    }
    return fits ? DONE : NO_MEMORY;
}
