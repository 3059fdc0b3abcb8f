/* Chooses spare replicas: arrays in, `spares.h`, arrays out. */
#include <stdlib.h>
#include <string.h>

#include "../native/export.h"
#include "../native/sparse.h"
#include "spares.h"

#define MOST_SCENARIOS 256

/* Puts a layout and a load into a flow, experts evenly on their replicas and nothing in spare slots. A spare replica of
 * an expert that its server holds anyway is dropped. Returns the load of experts with replicas. */
static double
fill_flow(const Spares *spares, Flow *flow, const double *load_E, const int64_t *first_X, const int32_t *expert_N,
          const int32_t *spare_S)
{
    double total = 0;
    for (int32_t s = 0; s < spares->servers; s++) {
        int32_t slot = flow->first_S[s];
        for (int64_t i = first_X[s]; i < first_X[s + 1]; i++) {
            flow_put(flow, slot++, expert_N[i]);
        }
    }
    for (int32_t e = 0; e < spares->experts; e++) {
        int32_t replicas = 0;
        for (int32_t n = flow->head_E[e]; n != NONE; n = flow->next_N[n]) {
            replicas++;
        }
        for (int32_t n = flow->head_E[e]; n != NONE; n = flow->next_N[n]) {
            flow->flow_N[n] = load_E[e] / replicas;
            flow->load_S[flow->server_N[n]] += flow->flow_N[n];
        }
        total += replicas > 0 ? load_E[e] : 0;
    }
    for (int32_t s = 0; s < spares->servers; s++) {
        if (spare_S[s] != NONE && !is_held(flow, s, spare_S[s])) {
            flow_put(flow, spare_slot(spares, s), spare_S[s]);
        }
    }
    return total;
}

static void
begin(Spares *spares, const double *load_BE, const int64_t *first_X, const int32_t *expert_N, const double *speed_S,
      const int32_t *spare_S)
{
    double speed = 0, *middle_E = spares->bound_E;
    size_t experts = (size_t)spares->experts;
    memset(middle_E, 0, experts * sizeof(double));
    for (int32_t b = 0; b < spares->scenarios; b++) {
        for (size_t e = 0; e < experts; e++) {
            middle_E[e] += load_BE[(size_t)b * experts + e] / spares->scenarios;
        }
    }
    for (int32_t s = 0; s < spares->servers; s++) {
        speed += speed_S[s];
    }
    for (int32_t b = 0; b <= spares->scenarios; b++) {
        const double *load_E = b < spares->scenarios ? load_BE + (size_t)b * experts : middle_E;
        double total = fill_flow(spares, &spares->flow_B[b], load_E, first_X, expert_N, spare_S);
        spares->mean_B[b] = total / speed;
        spares->weight_B[b] = total > 0 ? (double)spares->servers / total / spares->scenarios : 0;
    }
}

/* Chooses the experts of the spare slots, spare_S (-1: none), in place: for loads (B, E) and a layer's sparse layout
 * without them (first_X, X = S + 1, and expert_N). Only servers in open_S get another expert. */
EXPORT int
plan_spares(const double *load_BE, const int64_t *first_X, const int32_t *expert_N, const double *speed_S,
            const bool *open_S, double least, int32_t *spare_S, ptrdiff_t scenarios, ptrdiff_t experts,
            ptrdiff_t servers, ptrdiff_t ends, ptrdiff_t held)
{
    if (ends != servers + 1 || servers < 1 || experts < 1 || scenarios < 1) {
        return OUT_OF_RANGE;
    }
    if (scenarios > MOST_SCENARIOS || servers > INT32_MAX / 16 / experts) {
        return TOO_MANY;
    }
    if (!rows_fit(first_X, ends, expert_N, held, experts)) {
        return OUT_OF_RANGE;
    }
    for (ptrdiff_t s = 0; s < servers; s++) {
        if (spare_S[s] < NONE || spare_S[s] >= experts) {
            return OUT_OF_RANGE;
        }
    }
    size_t b = (size_t)scenarios, e = (size_t)experts, s = (size_t)servers;
    int32_t slots = (int32_t)(held + servers);
    size_t flow_size = (flow_bytes((int32_t)servers, (int32_t)experts, slots) + 63) / 64 * 64;
    char *flows = malloc((b + 1) * flow_size);
    Flow *flow_B = malloc((b + 1) * sizeof(Flow));
    double *doubles = malloc((4 * (b + 1) + e * (b + 1) + s) * sizeof(double));
    int32_t *counts = malloc((e + 3 * s + 1) * sizeof(int32_t) + s);
    bool fits = flows && flow_B && doubles && counts;
    if (fits) {
        Spares spares = {.scenarios = (int32_t)scenarios, .servers = (int32_t)servers, .experts = (int32_t)experts};
        int32_t *first_S = counts;
        spares.open_S = open_S;
        spares.least = least;
        spares.flow_B = flow_B;
        spares.mean_B = doubles;
        spares.weight_B = spares.mean_B + b + 1;
        spares.excess_B = spares.weight_B + b + 1;
        spares.most_B = spares.excess_B + b;
        spares.bound_EB = spares.most_B + b;
        spares.bound_E = spares.bound_EB + e * b;
        spares.capacity_S = spares.bound_E + e;
        spares.order_S = first_S + s + 1;
        spares.before_S = spares.order_S + s;
        spares.hot = spares.before_S + s;
        spares.empty_S = (uint8_t *)(spares.hot + e);
        for (size_t i = 0; i <= s; i++) {
            first_S[i] = (int32_t)(first_X[i] + (int64_t)i);
        }
        for (size_t i = 0; i <= b; i++) {
            flow_init(&flow_B[i], flows + i * flow_size, spares.servers, spares.experts, first_S, speed_S);
            memset(flow_B[i].settled_S, 0, s);
        }
        begin(&spares, load_BE, first_X, expert_N, speed_S, spare_S);
        refill_spares(&spares);
        exchange_spares(&spares);
        for (int32_t i = 0; i < spares.servers; i++) {
            spare_S[i] = flow_B[0].expert_N[spare_slot(&spares, i)];
        }
    }
    free(flows);
    free(flow_B);
    free(doubles);
    free(counts);
    return fits ? DONE : NO_MEMORY;
}
