/* Places replicas without statistics: pairs of servers that share experts vary, so that all share a lost load. */
#include "planning.h"

#include <string.h>

/* Beyond this many replicas of an expert, the sum of that many narrow counts could overflow. */
#define MOST_NARROW (UINT16_MAX / UINT8_MAX)

/* Experts in common are counted for any two servers. With many servers there are few, and the counts are narrow.
 *
 * Sets of servers have a bit for each, `words` of 64: nearly always there is a server that shares no expert with the
 * expert's other servers, and sets find the first one without a look at the counts. */
typedef struct {
    ptrdiff_t words;
    int32_t *total;    /* by server */
    int32_t *left;     /* by server */
    uint64_t *open;    /* set: the emptiest servers, which get the next replicas */
    uint64_t *lowest;  /* set: those with the lowest total ... */
    uint64_t *next;    /* ... and with one more */
    uint64_t *taken;   /* set: those with the expert, ... */
    uint64_t *met;     /* ... or that share another one with them */
    uint64_t *meets;   /* sets by server: those with which it shares experts */
    int32_t *shared;   /* by server: experts in common with those that have the expert */
    int32_t *pairs;    /* servers x servers; NULL: narrow */
    uint16_t *narrow_shared;
    uint8_t *narrow_pairs;
} SpreadRoom;

static inline void
put_in(uint64_t *set, ptrdiff_t s)
{
    set[s / 64] |= (uint64_t)1 << s % 64;
}

static inline void
take_out(uint64_t *set, ptrdiff_t s)
{
    set[s / 64] &= ~((uint64_t)1 << s % 64);
}

static inline bool
is_in(const uint64_t *set, ptrdiff_t s)
{
    return set[s / 64] >> s % 64 & 1;
}

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
            put_in(room->meets + server[i] * room->words, server[j]);
            if (room->pairs != NULL) {
                room->pairs[at]++;
            } else {
                room->narrow_pairs[at] = (uint8_t)(room->narrow_pairs[at] + (room->narrow_pairs[at] < UINT8_MAX));
            }
        }
    }
}

/* Puts a server in the set of its total; those ahead over all layers are in none. */
static void
rank(const SpreadRoom *room, ptrdiff_t s, int32_t least)
{
    take_out(room->lowest, s);
    take_out(room->next, s);
    if (room->total[s] <= least + 1) {
        put_in(room->total[s] == least ? room->lowest : room->next, s);
    }
}

/* The first open server, in turn from `first`, of a set that meets none of the expert's; -1: none. */
static ptrdiff_t
first_apart(const SpreadRoom *room, const uint64_t *set, ptrdiff_t first)
{
    uint64_t before = ((uint64_t)1 << first % 64) - 1;
    for (ptrdiff_t i = 0; i <= room->words; i++) {
        ptrdiff_t w = first / 64 + i < room->words ? first / 64 + i : first / 64 + i - room->words;
        uint64_t found = room->open[w] & set[w] & ~room->met[w];
        found &= i == 0 ? ~before : i == room->words ? before : ~(uint64_t)0;
        if (found) {
            return w * 64 + __builtin_ctzll(found);
        }
    }
    return -1;
}

/* The open server that lacks the expert and shares the fewest, then has the lowest total, in turn from `first`; -1: none.
 * `behind`: only those that are not ahead; `least`: the lowest total of all. */
static ptrdiff_t
least_shared(const SpreadRoom *room, ptrdiff_t first, bool behind, int32_t least)
{
    uint64_t before = ((uint64_t)1 << first % 64) - 1;
    int64_t best_key = INT64_MAX;
    ptrdiff_t best = -1;
    for (ptrdiff_t i = 0; i <= room->words; i++) {
        ptrdiff_t w = first / 64 + i < room->words ? first / 64 + i : first / 64 + i - room->words;
        uint64_t left = room->open[w] & ~room->taken[w] & (behind ? room->lowest[w] | room->next[w] : ~(uint64_t)0);
        left &= i == 0 ? ~before : i == room->words ? before : ~(uint64_t)0;
        for (; left; left &= left - 1) {
            ptrdiff_t s = w * 64 + __builtin_ctzll(left);
            int64_t shared = room->pairs != NULL ? room->shared[s] : room->narrow_shared[s];
            int64_t key = shared << 32 | room->total[s];
            if (key < best_key) {
                best_key = key;
                best = s;
                if (key == ((int64_t)1 << 32 | least)) {
                    return best; /* first_apart found none that shares less. */
                }
            }
        }
    }
    return best;
}

static int32_t
lowest_total(const int32_t *total, ptrdiff_t servers, ptrdiff_t *how_many)
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

/* Opens the servers with the most free slots; returns their number. */
static ptrdiff_t
open_emptiest(const SpreadRoom *room, ptrdiff_t servers)
{
    int32_t most = 1;
    ptrdiff_t size = 0;
    for (ptrdiff_t s = 0; s < servers; s++) {
        most = room->left[s] > most ? room->left[s] : most;
    }
    for (ptrdiff_t s = 0; s < servers; s++) {
        if (room->left[s] == most) {
            put_in(room->open, s);
            size++;
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
    int32_t *left = room->left, *total = room->total;
    size_t set_bytes = (size_t)room->words * sizeof(uint64_t);
    ptrdiff_t at_least, size = 0;
    int32_t least = lowest_total(total, servers, &at_least);
    memset(room->open, 0, set_bytes);
    for (ptrdiff_t s = 0; s < servers; s++) {
        left[s] = (int32_t)slots[s];
        rank(room, s, least);
    }
    for (ptrdiff_t e = 0; e < experts; server += count[e], e++) {
        memset(room->taken, 0, set_bytes);
        memset(room->met, 0, set_bytes);
        int64_t copy = 0, added = 0;
        for (; copy < count[e]; copy++) {
            if (size == 0) {
                size = open_emptiest(room, servers);
            }
            ptrdiff_t s = first_apart(room, room->lowest, first);
            s = s < 0 ? first_apart(room, room->next, first) : s;
            if (s < 0) {
                if (added == 0) {
                    clear_shared(room, servers);
                }
                for (; added < copy; added++) {
                    add_shared(room, servers, server[added]);
                }
                s = least_shared(room, first, true, least);
                s = s < 0 ? least_shared(room, first, false, least) : s;
            }
            if (s >= 0) {
                size--;
                take_out(room->open, s);
            } else {
                /* The emptiest servers all have it. */
                for (ptrdiff_t i = 0; i < servers; i++) {
                    if (!is_in(room->taken, i) && left[i] > (s < 0 ? 0 : left[s])) {
                        s = i;
                    }
                }
                if (s < 0) {
                    break;
                }
            }
            put_in(room->taken, s);
            put_in(room->met, s);
            const uint64_t *meets = room->meets + s * room->words;
            for (ptrdiff_t w = 0; w < room->words; w++) {
                room->met[w] |= meets[w];
            }
            server[copy] = (int32_t)s;
            left[s]--;
        }
        count_pairs(room, servers, server, copy);
        for (int64_t i = 0; i < copy; i++) {
            int32_t s = server[i];
            total[s]++;
            rank(room, s, least);
            if (total[s] - 1 == least && --at_least == 0) {
                least = lowest_total(total, servers, &at_least);
                for (ptrdiff_t other = 0; other < servers; other++) {
                    rank(room, other, least);
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
    size_t words = (n + 63) / 64;
    size_t bytes = (5 + n) * words * sizeof(uint64_t) + 3 * n * sizeof(int32_t) +
                   n * n * (narrow ? 1 : sizeof(int32_t));
    char *memory = calloc(bytes, 1);
    if (memory == NULL) {
        return NO_MEMORY;
    }
    SpreadRoom room = {.words = (ptrdiff_t)words, .open = (uint64_t *)memory};
    room.lowest = room.open + words;
    room.next = room.lowest + words;
    room.taken = room.next + words;
    room.met = room.taken + words;
    room.meets = room.met + words;
    room.total = (int32_t *)(room.meets + n * words);
    room.left = room.total + n;
    room.shared = room.left + n;
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
