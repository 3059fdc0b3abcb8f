/* What the parts of fill share. No Python in here. */
#ifndef EAAS_FRACTIONAL_FILL_H
#define EAAS_FRACTIONAL_FILL_H

#include "../native/heap.h"
#include "items.h"

/* one_by_one.c: room by server for `filled_S` and `open_S`, by expert for `count_E` and `heap`. All experts, where spare
 * slots are few; then, in slots that are still free, further replicas. */
void pack_items(Layer *layer, Items *items, Items *room, double *filled_S, int32_t *open_S);
void use_free_slots(Layer *layer, int32_t *count_E, double *filled_S, int32_t *open_S, Entry *heap);

#endif
