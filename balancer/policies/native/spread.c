/* Places replicas without statistics: pairs of servers that share experts vary, so that all share a lost load. */
#include "planning.h"

#include <string.h>

typedef struct {
    int32_t *total;    /* by server */
    int32_t *left;     /* by server */
    int32_t *shared;   /* by server */
    int32_t *taken_by; /* by server */
    int32_t *list;     /* by server */
    int32_t *chosen;   /* by server */
    int32_t *pairs;    /* servers x servers */
} SpreadRoom;

static int32_t
lowest(const int32_t *total, ptrdiff_t servers, ptrdiff_t *how_many)
{
    int32_t least = INT32_MAX;
    for (ptrdiff_t s = 0; s < servers; s++) {
        least = total[s] < least ? total[s] : least;
    }
    *how_many = 0;
    for (ptrdiff_t s = 0; s < servers; s++) {
        *how_many += total[s] == least;
    }
    return least;
}

/* Servers with the most free slots, in turn. */
static ptrdiff_t
emptiest(const int32_t *left, ptrdiff_t servers, ptrdiff_t first, int32_t *list)
{
    int32_t most = 1;
    for (ptrdiff_t s = 0; s < servers; s++) {
        most = left[s] > most ? left[s] : most;
    }
    ptrdiff_t size = 0;
    for (ptrdiff_t i = 0; i < servers; i++) {
        ptrdiff_t s = first + i < servers ? first + i : first + i - servers;
        if (left[s] == most) {
            list[size++] = (int32_t)s;
        }
    }
    return size;
}

/* Each replica goes to the emptiest server without its expert. Ties: first servers that are not ahead over all layers,
 * then the one that shares the fewest experts with the expert's other servers, then the lowest total, then in turn from
 * server `first`. `total` (by server) and `pairs` (by two servers) accumulate over layers. */
static void
spread(ptrdiff_t experts, ptrdiff_t servers, const int64_t *count, const int64_t *slots, ptrdiff_t first,
       int32_t *server, SpreadRoom *room)
{
    int32_t *left = room->left, *total = room->total, *shared = room->shared, *taken_by = room->taken_by;
    for (ptrdiff_t s = 0; s < servers; s++) {
        left[s] = (int32_t)slots[s];
        taken_by[s] = -1;
    }
    ptrdiff_t at_least, size = 0;
    int32_t least = lowest(total, servers, &at_least);
    for (ptrdiff_t e = 0; e < experts; e++) {
        for (ptrdiff_t s = 0; s < servers; s++) {
            shared[s] = 0;
        }
        int64_t copy = 0;
        for (; copy < count[e]; copy++) {
            ptrdiff_t best = -1;
            if (size == 0) {
                size = emptiest(left, servers, first, room->list);
            }
            int64_t best_key = INT64_MAX;
            for (ptrdiff_t i = 0; i < size; i++) {
                int32_t s = room->list[i];
                int64_t ahead = total[s] > least + 1;
                int64_t key = ahead << 62 | (int64_t)shared[s] << 32 | total[s];
                if (key < best_key && taken_by[s] != e) {
                    best_key = key;
                    best = i;
                    if (key == least) {
                        break; /* The lowest possible key. */
                    }
                }
            }
            int32_t s = -1;
            if (best >= 0) {
                s = room->list[best];
                size--;
                memmove(room->list + best, room->list + best + 1, (size_t)(size - best) * sizeof(*room->list));
            } else {
                /* The emptiest servers all have it. */
                for (ptrdiff_t i = 0; i < servers; i++) {
                    if (taken_by[i] != e && left[i] > (s < 0 ? 0 : left[s])) {
                        s = (int32_t)i;
                    }
                }
                if (s < 0) {
                    break;
                }
            }
            for (int64_t i = 0; i < copy; i++) {
                room->pairs[s * servers + room->chosen[i]]++;
                room->pairs[room->chosen[i] * servers + s]++;
            }
            room->chosen[copy] = s;
            taken_by[s] = (int32_t)e;
            server[copy] = s;
            left[s]--;
            const int32_t *with = room->pairs + s * servers;
            for (ptrdiff_t i = 0; copy + 1 < count[e] && i < servers; i++) {
                shared[i] += with[i];
            }
        }
        for (int64_t i = 0; i < copy; i++) {
            int32_t s = room->chosen[i];
            if (total[s]++ == least && --at_least == 0) {
                least = lowest(total, servers, &at_least);
            }
        }
        server += count[e];
    }
}

/* Counts (L, E), dealt to servers with these slots (L, S), into a compact placement `server` (L, P) of -1. */
EXPORT int
spread_layers(const int64_t *count_LE, const int64_t *slots_LS, int32_t *server_LP, ptrdiff_t layers,
              ptrdiff_t servers, ptrdiff_t experts, ptrdiff_t replicas)
{
    if (!counts_fit(count_LE, layers, experts, replicas)) {
        return OUT_OF_RANGE;
    }
    size_t n = (size_t)servers;
    int32_t *memory = calloc(n * (n + 6), sizeof(*memory));
    if (memory == NULL) {
        return NO_MEMORY;
    }
    SpreadRoom room = {memory,         memory + n,     memory + 2 * n, memory + 3 * n,
                       memory + 4 * n, memory + 5 * n, memory + 6 * n};
    for (ptrdiff_t l = 0; l < layers; l++) {
        spread(experts, servers, count_LE + l * experts, slots_LS + l * servers, l % servers,
               server_LP + l * replicas, &room);
    }
    free(memory);
    return DONE;
}
