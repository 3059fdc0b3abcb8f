/* The planning of one layer: which slot holds which expert. No Python in here.
 *
 * Letters: B scenarios, E experts, S servers, N slots; see eaas/minmax/flow.h for the flow.
 */
#ifndef EAAS_FRACTIONAL_LAYER_H
#define EAAS_FRACTIONAL_LAYER_H

#include "../../../eaas/minmax/flow.h"

/* A dispatcher reads from its share that a replica is there: none has less. */
#define LEAST_SHARE 1e-7

typedef struct {
    int32_t scenarios, servers, experts;
    const int32_t *first_S; /* S + 1: slots of server s are first_S[s] .. first_S[s + 1] - 1 */
    const double *speed_S;
    const int32_t *node_S; /* NULL: no limit */
    int32_t nodes;
    int64_t most_abroad; /* replicas that experts may have in further nodes than one */
    double price;        /* a replica that is loaded must lower the mean PAR of the scenarios by this */
    double *load_BE;     /* what is planned for; the mean of it is load_E */
    double *load_E;
    Flow *flow_B; /* the same experts in the same slots; each scenario its own flow */
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
int64_t count_abroad(const Layer *layer, int32_t expert);

/* fill.c: slots from nothing, for load_E. */
void fill(Layer *layer);

/* keep.c: slots from what servers hold now (holds_SE), as far as there is room; every expert is held then. The flow
 * is the shares, as far as they are known (shares_SE may be NULL). */
void keep(Layer *layer, const uint8_t *holds_SE, const double *shares_SE);
/* A slot for every expert without one, where need be that of another's second replica. */
void cover(Layer *layer);
/* Gives replicas abroad up until there are no more than may be. */
void limit_abroad(Layer *layer);

/* refill.c: fills servers anew to the mean of load_E, with what they hold as far as it goes; nothing where that does not
 * pay. For one scenario, without nodes. Returns what the PAR is above 1 at most then (INFINITY: not known). */
double refill(Layer *layer);

/* improve.c: exchanges experts for as long as it pays, with so many rounds of shifting load at most. Returns the mean
 * PAR of the scenarios. */
double improve(Layer *layer, int32_t rounds);

#endif
