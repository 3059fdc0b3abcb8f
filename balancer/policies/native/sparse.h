/* Sparse layouts: balancer/policies/sparse.py describes them.
 *
 * A row is a server in a layer, and there are L x S of them. `first` (X = L x S + 1) has the begin of each row in
 * `expert` and `share` (N), which have a server's experts in ascending order.
 */
#ifndef EAAS_POLICIES_SPARSE_H
#define EAAS_POLICIES_SPARSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Whether rows follow one another within `size`, each with ascending experts below `experts`. */
static inline bool
rows_fit(const int64_t *first, ptrdiff_t ends, const int32_t *expert, ptrdiff_t size, ptrdiff_t experts)
{
    if (ends < 1 || first[0] != 0 || first[ends - 1] != size) {
        return false;
    }
    for (ptrdiff_t row = 0; row + 1 < ends; row++) {
        if (first[row + 1] < first[row] || first[row + 1] > size) {
            return false;
        }
        int32_t last = -1;
        for (int64_t n = first[row]; n < first[row + 1]; n++) {
            if (expert[n] <= last || expert[n] >= experts) {
                return false;
            }
            last = expert[n];
        }
    }
    return true;
}

#endif
