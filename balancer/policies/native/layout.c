/* Loads of servers under compact and dense layouts. */
#include "planning.h"

#include <string.h>

#include "held.h"

static int64_t
count_placed(const int32_t *server, int64_t count)
{
    int64_t placed = 0;
    for (int64_t i = 0; i < count; i++) {
        placed += server[i] >= 0;
    }
    return placed;
}

/* `out` (L, S): loads of servers under a compact placement with equal shares. */
EXPORT int
compact_load(const double *load_LE, const int64_t *count_LE, const int32_t *server, double *out, ptrdiff_t layers,
             ptrdiff_t servers, ptrdiff_t experts, ptrdiff_t replicas)
{
    if (!counts_fit(count_LE, layers, experts, replicas) || !servers_fit(server, layers * replicas, servers)) {
        return OUT_OF_RANGE;
    }
    memset(out, 0, (size_t)(layers * servers) * sizeof(*out));
    for (ptrdiff_t l = 0; l < layers; l++) {
        const int64_t *count = count_LE + l * experts;
        const int32_t *next = server + l * replicas;
        for (ptrdiff_t e = 0; e < experts; next += count[e], e++) {
            double part = load_LE[l * experts + e] / (double)count_placed(next, count[e]);
            for (int64_t i = 0; i < count[e]; i++) {
                if (next[i] >= 0) {
                    out[l * servers + next[i]] += part;
                }
            }
        }
    }
    return DONE;
}

/* `out` (L, S): loads of servers. The shares are far apart in memory: prefetches them. */
EXPORT int
server_load(const double *load_LE, const uint8_t *holds, const double *shares, double *out, ptrdiff_t layers,
            ptrdiff_t servers, ptrdiff_t experts)
{
    if (!list_fits(servers, experts)) {
        return TOO_MANY;
    }
    void *memory = malloc(list_bytes(servers, experts));
    if (memory == NULL) {
        return NO_MEMORY;
    }
    HeldList list = list_in(memory, servers);
    for (ptrdiff_t l = 0; l < layers; l++, holds += servers * experts, shares += servers * experts) {
        list_held(holds, servers, experts, &list);
        for (ptrdiff_t s = 0; s < servers; s++) {
            for (int32_t i = list.first[s]; i < list.first[s + 1]; i++) {
                __builtin_prefetch(shares + s * experts + list.expert[i]);
            }
        }
        for (ptrdiff_t s = 0; s < servers; s++) {
            double sum = 0;
            for (int32_t i = list.first[s]; i < list.first[s + 1]; i++) {
                sum += load_LE[l * experts + list.expert[i]] * shares[s * experts + list.expert[i]];
            }
            out[l * servers + s] = sum;
        }
    }
    free(memory);
    return DONE;
}

/* Equal shares of each expert into zeroed `shares` (L, S, E). */
EXPORT int
equal_shares(const uint8_t *holds, double *shares, ptrdiff_t layers, ptrdiff_t servers, ptrdiff_t experts)
{
    if (!list_fits(servers, experts)) {
        return TOO_MANY;
    }
    int64_t *count = malloc((size_t)experts * sizeof(*count) + list_bytes(servers, experts));
    if (count == NULL) {
        return NO_MEMORY;
    }
    HeldList list = list_in(count + experts, servers);
    for (ptrdiff_t l = 0; l < layers; l++, holds += servers * experts, shares += servers * experts) {
        list_held(holds, servers, experts, &list);
        count_held(&list, servers, experts, count);
        for (ptrdiff_t s = 0; s < servers; s++) {
            for (int32_t i = list.first[s]; i < list.first[s + 1]; i++) {
                shares[s * experts + list.expert[i]] = 1.0 / (double)count[list.expert[i]];
            }
        }
    }
    free(count);
    return DONE;
}
