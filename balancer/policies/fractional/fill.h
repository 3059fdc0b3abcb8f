/* Shared by the parts of fill. */
#ifndef EAAS_FRACTIONAL_FILL_H
#define EAAS_FRACTIONAL_FILL_H

#include "../native/keys.h"
#include "items.h"

/* one_by_one.c: scratch by server (`filled_S`, `open_S`) and by expert (`count_E`, `heap`). pack_items places all
 * experts if spare slots are few; use_free_slots puts further replicas into free slots. */
void pack_items(Layer *layer, Items *items, Items *room, double *filled_S, int32_t *open_S);
void use_free_slots(Layer *layer, int32_t *count_E, double *filled_S, int32_t *open_S, uint64_t *heap);

#endif
