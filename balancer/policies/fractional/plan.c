/* Plans all layers: arrays in, `layer.h` for each layer, arrays out. */
#include <stdlib.h>

#include "../native/export.h"
#include "../native/keys.h"
#include "../native/sparse.h"
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
plan_layer(Layer *layer, const Held *held)
{
    int32_t rounds = INT32_MAX;
    if (held->first_S != NULL) {
        keep(layer, held);
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

/* Writes the layer's rows behind `at`; returns the end. Shares are means over the scenarios' flows. */
static int64_t
write_layer(const Layer *layer, int64_t at, int64_t *end_S, int32_t *expert, double *share)
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
    return write_rows(first, share_N, at, end_S, expert, share);
}

/* A sparse layout (first_X, expert_N, share_N: see native/sparse.c; N is the number of slots) for loads (B, L, E) and
 * slots (L, S, E at most each), from a current one of the same form (NULL: nothing is held) and its shares (NULL: not
 * known). `node_S`, `most_cross_node`, `price`: see `Layer`. */
EXPORT int
plan_fractional(const double *load_BLE, const int64_t *slots_LS, const double *speed_S, const int64_t *now_X,
                const int32_t *now_M, const double *now_share_M, const int32_t *node_S, int64_t most_cross_node,
                double price, int64_t *first_X, int32_t *expert_N, double *share_N, ptrdiff_t scenarios,
                ptrdiff_t layers, ptrdiff_t servers, ptrdiff_t experts, ptrdiff_t ends, ptrdiff_t held_size,
                ptrdiff_t room)
{
    if (scenarios < 1 || servers < 1 || experts < 1 || ends != layers * servers + 1) {
        return OUT_OF_RANGE;
    }
    if (now_X != NULL && (now_M == NULL || !rows_fit(now_X, ends, now_M, held_size, experts))) {
        return OUT_OF_RANGE;
    }
    if (experts > MOST_ITEMS || servers > INT32_MAX / 16 / experts || scenarios > MOST_SCENARIOS) {
        return TOO_MANY;
    }
    int32_t b = (int32_t)scenarios, s = (int32_t)servers, e = (int32_t)experts, nodes = 0;
    int32_t most_slots = (int32_t)count_slots(slots_LS, layers, servers, experts, room);
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
    int64_t at = 0;
    first_X[0] = 0;
    for (ptrdiff_t l = 0; fits && l < layers; l++) {
        Held held = {.first_S = now_X == NULL ? NULL : now_X + l * servers, .expert = now_M, .share = now_share_M};
        begin_layer(&layer, load_BLE + l * experts, (size_t)(layers * experts), slots_LS + l * servers, first_S, flows,
                    flow_size);
        plan_layer(&layer, &held);
        at = write_layer(&layer, at, first_X + l * servers + 1, expert_N, share_N);
    }
    void *blocks[] = {first_S, flows, layer.load_BE, layer.load_E, layer.flow_B, layer.scratch, layer.counts};
    for (size_t i = 0; i < sizeof(blocks) / sizeof(*blocks); i++) {
        free(blocks[i]);
    }
    return fits ? DONE : NO_MEMORY;
}
