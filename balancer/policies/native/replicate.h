/* How many replicas each expert gets. */
#ifndef EAAS_POLICIES_REPLICATE_H
#define EAAS_POLICIES_REPLICATE_H

#include <stdbool.h>

#include "keys.h"

/* One replica for each expert, then `extra` more, each to the expert with the highest load per replica (ties by index)
 * and fewer than `cap`. `picks`, if not NULL, gets their experts; `heap` is by expert. In `single` precision, like
 * torch. */
void replicate(const double *load, ptrdiff_t experts, ptrdiff_t extra, int64_t cap, bool single, int64_t *count,
               int64_t *picks, uint64_t *heap);

#endif
