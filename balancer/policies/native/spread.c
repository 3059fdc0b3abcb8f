/* Places replicas without statistics: pairs of servers that share experts vary, so that all share a lost load. */
#include "planning.h"

#include <string.h>

/* Beyond this many replicas of an expert, the sum of that many narrow counts could overflow. */
#define MOST_NARROW (UINT16_MAX / UINT8_MAX)

/* Experts in common are counted for any two servers. With many servers there are few, and the counts are narrow: a row
 * of them is read for every replica, which takes most of the time. */
typedef struct {
    int32_t *total;    /* by server */
    int32_t *left;     /* by server */
    int32_t *taken_by; /* by server */
    int32_t *list;     /* by server */
    int64_t *base;     /* by server: its key in the search, without what it shares */
    int32_t *shared;   /* by server */
    int32_t *pairs;    /* servers x servers; NULL: narrow */
    uint16_t *narrow_shared;
    uint8_t *narrow_pairs;
} SpreadRoom;

static void
clear_shared(const SpreadRoom *room, ptrdiff_t servers)
{
    if (room->pairs != NULL) {
        memset(room->shared, 0, (size_t)servers * sizeof(*room->shared));
    } else {
        memset(room->narrow_shared, 0, (size_t)servers * sizeof(*room->narrow_shared));
    }
}

/* Adds the number of experts that each server has in common with server s. */
static void
add_shared(const SpreadRoom *room, ptrdiff_t servers, int32_t s)
{
    if (room->pairs != NULL) {
        int32_t *restrict shared = room->shared;
        const int32_t *restrict with = room->pairs + s * servers;
        for (ptrdiff_t i = 0; i < servers; i++) {
            shared[i] += with[i];
        }
        return;
    }
    uint16_t *restrict shared = room->narrow_shared;
    const uint8_t *restrict with = room->narrow_pairs + s * servers;
    /* The matrix is larger than the cache, and the next row is not known before. */
    for (ptrdiff_t i = 0; i < servers; i += 64) {
        __builtin_prefetch(with + i);
    }
    for (ptrdiff_t i = 0; i < servers; i++) {
        shared[i] = (uint16_t)(shared[i] + with[i]);
    }
}

/* Counts an expert that these servers share. */
static void
count_pairs(const SpreadRoom *room, ptrdiff_t servers, const int32_t *server, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        for (int64_t j = 0; j < count; j++) {
            ptrdiff_t at = server[i] * servers + server[j];
            if (i == j) {
                continue;
            }
            if (room->pairs != NULL) {
                room->pairs[at]++;
            } else {
                room->narrow_pairs[at] = (uint8_t)(room->narrow_pairs[at] + (room->narrow_pairs[at] < UINT8_MAX));
            }
        }
    }
}

/* A server's key: those ahead over all layers last, then by total. */
static int64_t
base_of(const SpreadRoom *room, ptrdiff_t s, int32_t least)
{
    int64_t ahead = room->total[s] > least + 1;
    return ahead << 62 | room->total[s];
}

/* Index in the list of the server with the lowest key that lacks expert e; -1: none. */
static ptrdiff_t
best_of(const SpreadRoom *room, ptrdiff_t size, int32_t e, int32_t least)
{
    const int64_t *base = room->base;
    int64_t best_key = INT64_MAX;
    ptrdiff_t best = -1;
    for (ptrdiff_t i = 0; i < size; i++) {
        int32_t s = room->list[i];
        int64_t shared = room->pairs != NULL ? room->shared[s] : room->narrow_shared[s];
        int64_t key = base[s] + (shared << 32);
        if (key < best_key && room->taken_by[s] != e) {
            best_key = key;
            best = i;
            if (key == least) {
                break; /* The lowest possible key. */
            }
        }
    }
    return best;
}

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
 * server `first`. `total` and what servers share accumulate over layers. */
static void
spread(ptrdiff_t experts, ptrdiff_t servers, const int64_t *count, const int64_t *slots, ptrdiff_t first,
       int32_t *server, const SpreadRoom *room)
{
    int32_t *left = room->left, *total = room->total, *taken_by = room->taken_by;
    ptrdiff_t at_least, size = 0;
    int32_t least = lowest(total, servers, &at_least);
    for (ptrdiff_t s = 0; s < servers; s++) {
        left[s] = (int32_t)slots[s];
        taken_by[s] = -1;
        room->base[s] = base_of(room, s, least);
    }
    for (ptrdiff_t e = 0; e < experts; server += count[e], e++) {
        clear_shared(room, servers);
        int64_t copy = 0;
        for (; copy < count[e]; copy++) {
            if (size == 0) {
                size = emptiest(left, servers, first, room->list);
            }
            ptrdiff_t best = best_of(room, size, (int32_t)e, least);
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
            taken_by[s] = (int32_t)e;
            server[copy] = s;
            left[s]--;
            if (copy + 1 < count[e]) {
                add_shared(room, servers, s);
            }
        }
        count_pairs(room, servers, server, copy);
        for (int64_t i = 0; i < copy; i++) {
            int32_t s = server[i];
            total[s]++;
            room->base[s] = base_of(room, s, least);
            if (total[s] - 1 == least && --at_least == 0) {
                least = lowest(total, servers, &at_least);
                for (ptrdiff_t other = 0; other < servers; other++) {
                    room->base[other] = base_of(room, other, least);
                }
            }
        }
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
    /* With so few pairs, less than one is usual. */
    double pairs = 0;
    int64_t most = 0;
    for (ptrdiff_t i = 0; i < layers * experts; i++) {
        pairs += (double)count_LE[i] * (double)count_LE[i];
        most = count_LE[i] > most ? count_LE[i] : most;
    }
    size_t n = (size_t)servers;
    bool narrow = pairs < (double)servers * (double)servers && most <= MOST_NARROW;
    size_t bytes = n * sizeof(int64_t) + 5 * n * sizeof(int32_t) + n * n * (narrow ? 1 : sizeof(int32_t));
    char *memory = calloc(bytes, 1);
    if (memory == NULL) {
        return NO_MEMORY;
    }
    SpreadRoom room = {.base = (int64_t *)memory};
    room.total = (int32_t *)(room.base + n);
    room.left = room.total + n;
    room.taken_by = room.left + n;
    room.list = room.taken_by + n;
    room.shared = room.list + n;
    room.narrow_shared = (uint16_t *)room.shared;
    if (narrow) {
        room.narrow_pairs = (uint8_t *)(room.shared + n);
    } else {
        room.pairs = room.shared + n;
    }
    for (ptrdiff_t l = 0; l < layers; l++) {
        spread(experts, servers, count_LE + l * experts, slots_LS + l * servers, l % servers,
               server_LP + l * replicas, &room);
    }
    free(memory);
    return DONE;
}
