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
    double speed;        /* of all servers */
    const int32_t *node_S; /* NULL: no limit */
    int32_t nodes;
    int64_t most_cross_node; /* most replicas on other nodes than their expert's first */
    double price;        /* a loaded replica must lower the mean PAR of the scenarios by this */
    double *load_BE;     /* the loads to plan for; their mean is load_E */
    double *load_E;
    Flow *flow_B; /* the same experts in the same slots for all scenarios, each with its own flow */
    char *scratch; /* for one step at a time */
} Layer;

/* Parts of a block, one after another. Without a block they are only counted. */
typedef struct {
    char *block; /* aligned to ALIGNMENT */
    size_t used;
} Arena;

#define ALIGNMENT 64

static inline void *
carve(Arena *arena, size_t count, size_t size)
{
    void *part = arena->block == NULL ? NULL : arena->block + arena->used;
    arena->used += (count * size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return part;
}

/* What the steps need. */
size_t fill_bytes(const Layer *layer, int32_t slots);
size_t one_by_one_bytes(const Layer *layer);
size_t improve_bytes(const Layer *layer, int32_t slots);

/* In every scenario's flow. */
void put_everywhere(Layer *layer, int32_t slot, int32_t expert);
void take_everywhere(Layer *layer, int32_t slot);
void put_all(Layer *layer, const int32_t *expert_N);
bool holds(const Flow *flow, int32_t server, int32_t expert);
int32_t free_slot(const Flow *flow, int32_t server);
int32_t replicas(const Flow *flow, int32_t expert);

bool is_near(const Layer *layer, int32_t server, int32_t expert);
int64_t count_cross_node(const Layer *layer, int32_t expert);
/* Flows in any unit become shares, equal ones if they are 0. */
void make_shares(Flow *flow);

/* fill.c: deals load_E to empty slots, to each server its part. If servers differ, an expert may be left without a slot.
 * False: spare slots are too few. */
bool fill(Layer *layer);
/* ... and again, preferring what servers hold; changes nothing if that does not pay. For one scenario, without nodes.
 * Returns an upper bound of PAR - 1 (INFINITY: unknown). */
double refill(Layer *layer);

/* one_by_one.c: places all experts, if spare slots are few. */
void pack(Layer *layer);
/* Puts replicas of the hottest experts into free slots: not needed for this load, but useful for the next one. */
void use_free_slots(Layer *layer);

/* A layer's current layout: server s holds expert[first_S[s]] .. expert[first_S[s + 1] - 1], ascending. */
typedef struct {
    const int64_t *first_S; /* S + 1; NULL: nothing is held */
    const int32_t *expert;
    const double *share; /* NULL: not known */
} Held;

/* keep.c: slots from the current layout (fill.c without one), within the slots; every expert is held then. The flow
 * starts from the shares, if known. */
void begin_slots(Layer *layer, const Held *held);
/* A slot for every expert without one, if necessary that of another expert's second replica. */
void cover(Layer *layer);
/* Drops cross-node replicas until the limit is kept. */
void limit_abroad(Layer *layer);

/* improve.c: exchanges experts while that pays, with at most `rounds` rounds of shifting load. Returns the mean PAR of
 * the scenarios. */
double improve(Layer *layer, int32_t rounds);

#endif
