/* Plans one layer: which slot holds which expert.
 *
 * Letters: B scenarios, E experts, S servers, N slots; see eaas/minmax/flow.h for the flow.
 */
#ifndef EAAS_FRACTIONAL_LAYER_H
#define EAAS_FRACTIONAL_LAYER_H

#include "../../../eaas/minmax/flow.h"

/* Least share of a replica: dispatchers ignore replicas without one. */
#define LEAST_SHARE 1e-7

typedef struct {
    int32_t scenarios, servers, experts;
    const int32_t *first_S; /* S + 1: slots of server s are first_S[s] .. first_S[s + 1] - 1 */
    const double *speed_S;
    const int32_t *node_S; /* NULL: no limit */
    int32_t nodes;
    int64_t most_cross_node; /* most replicas on other nodes than their expert's first */
    double price;        /* a loaded replica must lower the mean PAR of the scenarios by this */
    double *load_BE;     /* the loads to plan for; their mean is load_E */
    double *load_E;
    Flow *flow_B; /* the same experts in the same slots for all scenarios, each with its own flow */
    double *scratch;     /* scratch_doubles() of them */
    int32_t *counts;     /* scratch_counts() of them */
} Layer;

size_t scratch_doubles(int32_t scenarios, int32_t servers, int32_t experts, int32_t slots);
size_t scratch_counts(int32_t servers, int32_t experts, int32_t slots);
size_t refill_doubles(int32_t experts, int32_t slots);
size_t refill_counts(int32_t servers, int32_t experts, int32_t slots);

/* In every scenario's flow. */
void put_everywhere(Layer *layer, int32_t slot, int32_t expert);
void take_everywhere(Layer *layer, int32_t slot);
bool holds(const Flow *flow, int32_t server, int32_t expert);
int32_t free_slot(const Flow *flow, int32_t server);
int32_t replicas(const Flow *flow, int32_t expert);

bool is_near(const Layer *layer, int32_t server, int32_t expert);
int64_t count_cross_node(const Layer *layer, int32_t expert);

/* rows.c: the most slots of a layer, or -1 if a layer's do not suffice, a server has more than E, or all have more than
 * there is room for in the result. */
int64_t count_slots(const int64_t *slots_LS, ptrdiff_t layers, ptrdiff_t servers, ptrdiff_t experts, ptrdiff_t room);
/* Writes the rows of a layer behind `at`, each server's experts ascending; returns the end. The shares are raised to
 * LEAST_SHARE and scaled to the sum 1, in place. */
int64_t write_rows(const Flow *flow, double *share_N, int64_t at, int64_t *end_S, int32_t *expert, double *share);

/* fill.c: slots from nothing, for load_E. */
void fill(Layer *layer);

/* A layer's current layout: server s holds expert[first_S[s]] .. expert[first_S[s + 1] - 1], ascending. */
typedef struct {
    const int64_t *first_S; /* S + 1; NULL: nothing is held */
    const int32_t *expert;
    const double *share; /* NULL: not known */
} Held;

/* keep.c: slots from the current layout, within the slots; every expert is held then. The flow starts from the shares,
 * if known. */
void keep(Layer *layer, const Held *held);
/* A slot for every expert without one, if necessary that of another expert's second replica. */
void cover(Layer *layer);
/* Drops cross-node replicas until the limit is kept. */
void limit_abroad(Layer *layer);

/* refill.c: fills servers anew to the mean of load_E, preferring what they hold; changes nothing if that does not pay.
 * For one scenario, without nodes. Returns an upper bound of PAR - 1 (INFINITY: unknown). */
double refill(Layer *layer);

/* improve.c: exchanges experts while that pays, with at most `rounds` rounds of shifting load. Returns the mean PAR of
 * the scenarios. */
double improve(Layer *layer, int32_t rounds);

#endif
