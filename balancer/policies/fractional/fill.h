/* Shared by the parts of fill. */
#ifndef EAAS_FRACTIONAL_FILL_H
#define EAAS_FRACTIONAL_FILL_H

#include "../native/keys.h"
#include "items.h"

/* Scratch of one_by_one.c. */
typedef struct {
    double *filled_S;
    int32_t *open_S;
    int64_t *count_E;
    uint64_t *heap; /* by expert */
} OneByOne;

/* Places all experts, if spare slots are few. */
void pack_items(Layer *layer, Items *items, OneByOne *one);
/* Puts replicas of the hottest experts into free slots: not needed for this load, but useful for the next one. */
void use_free_slots(Layer *layer, OneByOne *one);

#endif
