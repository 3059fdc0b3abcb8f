/* Layouts from compact placements, and the loads of servers. */
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

/* A compact placement into zeroed (L, S, E), an expert's replicas with equal shares; `shares` may be NULL. */
EXPORT int
scatter_layers(const int64_t *count_LE, const int32_t *server, uint8_t *holds, double *shares, ptrdiff_t layers,
               ptrdiff_t servers, ptrdiff_t experts, ptrdiff_t replicas)
{
    if (!counts_fit(count_LE, layers, experts, replicas) || !servers_fit(server, layers * replicas, servers)) {
        return OUT_OF_RANGE;
    }
    for (ptrdiff_t l = 0; l < layers; l++) {
        const int64_t *count = count_LE + l * experts;
        const int32_t *next = server + l * replicas;
        for (ptrdiff_t e = 0; e < experts; next += count[e], e++) {
            double share = 1.0 / (double)count_placed(next, count[e]);
            for (int64_t i = 0; i < count[e]; i++) {
                ptrdiff_t at = (l * servers + next[i]) * experts + e;
                if (next[i] < 0) {
                    continue;
                }
                holds[at] = 1;
                if (shares != NULL) {
                    shares[at] = share;
                }
            }
        }
    }
    return DONE;
}

/* The same of replicas in any order, their experts and servers (L, P). Two of an expert on one server add up. */
EXPORT int
scatter_replicas(const int64_t *count_LE, const int64_t *expert, const int64_t *server, uint8_t *holds,
                 double *shares, ptrdiff_t layers, ptrdiff_t servers, ptrdiff_t experts, ptrdiff_t replicas)
{
    if (!within(expert, layers * replicas, experts) || !within(server, layers * replicas, servers)) {
        return OUT_OF_RANGE;
    }
    for (ptrdiff_t l = 0; l < layers; l++) {
        for (ptrdiff_t i = l * replicas; i < (l + 1) * replicas; i++) {
            ptrdiff_t at = (l * servers + server[i]) * experts + expert[i];
            holds[at] = 1;
            shares[at] += 1.0 / (double)count_LE[l * experts + expert[i]];
        }
    }
    return DONE;
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

/* Adds to `found` the number of replicas that are held and were not. */
EXPORT int
count_new(const uint8_t *holds, const uint8_t *current, int64_t *found, ptrdiff_t layers, ptrdiff_t servers,
          ptrdiff_t experts)
{
    ptrdiff_t size = layers * servers * experts;
    for (ptrdiff_t at = 0; at < size; at += 255) {
        /* Counted in bytes, as many at once as fit into a byte's sum. */
        ptrdiff_t end = size - at < 255 ? size : at + 255;
        uint8_t some = 0;
        for (ptrdiff_t i = at; i < end; i++) {
            some = (uint8_t)(some + (holds[i] & ~current[i] & 1));
        }
        *found += some;
    }
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
