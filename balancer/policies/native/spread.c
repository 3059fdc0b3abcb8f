/* Replicas without statistics: which servers share experts varies, so that all share a lost server's load. */
#include "planning.h"

/* `first` is the server that begins in this layer. `total` (by server) and `pairs` (by two servers) go on from
 * layer to layer; `left` and `shared` are room for one number per server. */
void
spread(ptrdiff_t experts, ptrdiff_t servers, const int64_t *count, const int64_t *slots, int64_t first,
       uint8_t *holds, int64_t *total, int64_t *pairs, int64_t *left, int64_t *shared)
{
    for (ptrdiff_t s = 0; s < servers; s++) {
        left[s] = slots[s];
    }
    int64_t least = total[0];
    for (ptrdiff_t s = 1; s < servers; s++) {
        least = total[s] < least ? total[s] : least;
    }
    for (ptrdiff_t e = 0; e < experts; e++) {
        for (ptrdiff_t s = 0; s < servers; s++) {
            shared[s] = 0;
        }
        for (int64_t copy = 0; copy < count[e]; copy++) {
            /* The emptiest server; of those one that is not ahead over all layers; of those the one that shares
             * the fewest experts with the servers of this one; then by total, then in turn. */
            ptrdiff_t best = -1;
            for (ptrdiff_t i = 0; i < servers; i++) {
                ptrdiff_t s = (ptrdiff_t)((first + i) % servers);
                if (left[s] <= 0 || holds[s * experts + e]) {
                    continue;
                }
                if (best < 0 || left[s] > left[best]) {
                    best = s;
                    continue;
                }
                if (left[s] < left[best]) {
                    continue;
                }
                bool ahead = total[s] > least + 1, best_ahead = total[best] > least + 1;
                if (ahead != best_ahead) {
                    best = ahead ? best : s;
                } else if (shared[s] != shared[best]) {
                    best = shared[s] < shared[best] ? s : best;
                } else if (total[s] < total[best]) {
                    best = s;
                }
            }
            if (best < 0) {
                break;
            }
            left[best]--;
            total[best]++;
            for (ptrdiff_t s = 0; s < servers; s++) {
                if (holds[s * experts + e]) {
                    pairs[best * servers + s]++;
                    pairs[s * servers + best]++;
                }
            }
            holds[best * experts + e] = 1;
            for (ptrdiff_t s = 0; s < servers; s++) {
                shared[s] += pairs[best * servers + s];
            }
            /* The least total can have gone up. */
            if (total[best] - 1 == least) {
                least = total[0];
                for (ptrdiff_t s = 1; s < servers; s++) {
                    least = total[s] < least ? total[s] : least;
                }
            }
        }
    }
}
