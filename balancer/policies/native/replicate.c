/* How many replicas each expert gets. */
#include "replicate.h"

#include "planning.h"

/* In single precision loads per replica, and so ties, equal torch's float32. */
static inline double
per_replica(double load, int64_t count, bool single)
{
    return single ? (double)((float)load / (float)count) : load / (double)count;
}

void
replicate(const double *load, ptrdiff_t experts, ptrdiff_t extra, int64_t cap, bool single, int64_t *count,
          int64_t *picks, uint64_t *heap)
{
    ptrdiff_t size = experts;
    for (ptrdiff_t e = 0; e < experts; e++) {
        count[e] = 1;
        rise(heap, e, falling_key(load[e], e));
    }
    for (ptrdiff_t i = 0; i < extra && size > 0 && cap > 1; i++) {
        int32_t e = item_of(heap[0]);
        count[e]++;
        if (picks != NULL) {
            picks[i] = e;
        }
        if (count[e] >= cap) {
            drop_top(heap, &size);
        } else {
            replace_top(heap, size, falling_key(per_replica(load[e], count[e], single), e));
        }
    }
}

/* `picks` (L x width) is filled if width is above 0. */
EXPORT int
replicate_layers(const double *load_LE, const int64_t *extra_L, int64_t cap, bool single, int64_t *count_LE,
                 int64_t *picks, ptrdiff_t layers, ptrdiff_t experts, ptrdiff_t width)
{
    for (ptrdiff_t l = 0; width > 0 && l < layers; l++) {
        if (extra_L[l] > width) {
            return OUT_OF_RANGE;
        }
    }
    if (experts > MOST_ITEMS) {
        return TOO_MANY;
    }
    uint64_t *heap = malloc((size_t)experts * sizeof(*heap));
    if (heap == NULL) {
        return NO_MEMORY;
    }
    for (ptrdiff_t l = 0; l < layers; l++) {
        replicate(load_LE + l * experts, experts, extra_L[l], cap, single, count_LE + l * experts,
                  width > 0 ? picks + l * width : NULL, heap);
    }
    free(heap);
    return DONE;
}
