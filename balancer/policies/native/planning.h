/* Loops of the policies that NumPy cannot express.
 *
 * A placement is compact here: `count` has the replicas of each expert of a layer, and `server` the server of
 * each replica, one expert's after another's; -1 is a replica that found no place. An exported function handles all
 * layers of its arrays (L layers, E experts, S servers, P replicas).
 */
#ifndef EAAS_POLICIES_PLANNING_H
#define EAAS_POLICIES_PLANNING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include "export.h"

typedef struct {
    ptrdiff_t experts;
    ptrdiff_t servers;
    const double *load;  /* by expert */
    const double *speed; /* by server */
} Layer;

#endif
