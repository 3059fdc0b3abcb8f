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

/* Whether counts are at least 0, and `replicas` at most in a row. */
static inline bool
counts_fit(const int64_t *count, ptrdiff_t rows, ptrdiff_t experts, ptrdiff_t replicas)
{
    for (ptrdiff_t row = 0; row < rows; row++) {
        int64_t sum = 0, least = 0;
        for (ptrdiff_t e = 0; e < experts; e++) {
            sum += count[row * experts + e];
            least = count[row * experts + e] < least ? count[row * experts + e] : least;
        }
        if (least < 0 || sum > replicas) {
            return false;
        }
    }
    return true;
}

/* Whether all values are from 0 to below `end`. */
static inline bool
within(const int64_t *value, ptrdiff_t size, int64_t end)
{
    bool fit = true;
    for (ptrdiff_t i = 0; i < size; i++) {
        fit &= value[i] >= 0 && value[i] < end;
    }
    return fit;
}

/* Whether all servers exist or are -1. */
static inline bool
servers_fit(const int32_t *server, ptrdiff_t size, ptrdiff_t servers)
{
    bool fit = true;
    for (ptrdiff_t i = 0; i < size; i++) {
        fit &= server[i] >= -1 && server[i] < servers;
    }
    return fit;
}

#endif
