/* Packs for any slots, heaviest first, with an expert's replicas on different servers. */
#include "planning.h"

#include <math.h>
#include <string.h>

#include "keys.h"

/* A non-negative number and its item in one key, for comparisons without branches: the bits of non-negative doubles
 * sort like the numbers, and the lowest bits hold the index. Differences below 1e-11 are ignored. */
#define EXPERT_BITS UINT64_C(0xffff)
#define SERVER_BITS UINT64_C(0x3fff)

typedef struct {
    double *filled;    /* by server */
    int64_t *left;     /* by server */
    uint64_t *by_load; /* by expert */
    uint64_t *order;   /* by expert */
    uint64_t *sorting; /* by expert */
    uint64_t *heap;    /* by server */
    uint64_t *queue;   /* by server */
    uint8_t *held;     /* servers x experts */
    bool alike;        /* all servers are equally fast */
} PlaceRoom;

static inline uint64_t
bits_of(double value)
{
    uint64_t bits;
    value += 0.0; /* -0 has other bits than 0 */
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

/* The highest value first. */
static inline uint64_t
order_of(double value, ptrdiff_t expert)
{
    return (~bits_of(value) & ~EXPERT_BITS) | (uint64_t)expert;
}

static inline int32_t
expert_of(uint64_t order)
{
    return (int32_t)(order & EXPERT_BITS);
}

static void
sort_by_load(const Layer *layer, PlaceRoom *room)
{
    for (ptrdiff_t e = 0; e < layer->experts; e++) {
        room->by_load[e] = order_of(layer->load[e], e);
    }
    sort_keys(room->by_load, room->sorting, layer->experts);
}

/* Experts by load per replica, the highest first. Those with one replica are in order already. */
static void
sort_by_replica(const Layer *layer, const int64_t *count, PlaceRoom *room)
{
    uint64_t *order = room->order, *many = room->sorting;
    ptrdiff_t several = 0, out = 0, next = 0;
    for (ptrdiff_t i = 0; i < layer->experts; i++) {
        int32_t e = expert_of(room->by_load[i]);
        if (count[e] > 1) {
            many[several++] = order_of(layer->load[e] / (double)count[e], e);
        }
    }
    sort_keys(many, order, several);
    for (ptrdiff_t i = 0; i < layer->experts; i++) {
        uint64_t one = room->by_load[i];
        if (count[expert_of(one)] > 1) {
            continue;
        }
        while (next < several && many[next] < one) {
            order[out++] = many[next++];
        }
        order[out++] = one;
    }
    while (next < several) {
        order[out++] = many[next++];
    }
}

static inline uint64_t
key_of(const Layer *layer, const PlaceRoom *room, int32_t s)
{
    /* A division would take longer than the rest, and every placement would wait for it. */
    double filled = room->alike ? room->filled[s] : room->filled[s] / layer->speed[s];
    return (bits_of(filled) & ~SERVER_BITS) | (uint64_t)s;
}

static inline int32_t
server_of(uint64_t key)
{
    return (int32_t)(key & SERVER_BITS);
}

/* Servers with free slots, the least filled first. While values fall and servers are alike, servers with one replica
 * are in order without a heap: `queue`, the last one first; only those with more are in the heap. */
typedef struct {
    ptrdiff_t fresh;  /* servers from here on are empty; servers where that phase is over */
    ptrdiff_t queued; /* servers with one replica, in the order of filling */
    ptrdiff_t heaped;
} Lightest;

static int32_t
take_lightest(Lightest *from, const Layer *layer, PlaceRoom *room)
{
    while (from->fresh < layer->servers) {
        ptrdiff_t s = from->fresh++;
        if (room->left[s] > 0) {
            return (int32_t)s;
        }
    }
    /* Filled in falling order: the last one has the least. */
    if (from->queued > 0 && (from->heaped == 0 || room->queue[from->queued - 1] < room->heap[0])) {
        return server_of(room->queue[--from->queued]);
    }
    if (from->heaped == 0) {
        return -1;
    }
    int32_t s = server_of(room->heap[0]);
    drop_top(room->heap, &from->heaped);
    return s;
}

static void
give_back(Lightest *to, int32_t s, bool first, const Layer *layer, PlaceRoom *room)
{
    if (room->left[s] == 0) {
        return;
    }
    uint64_t key = key_of(layer, room, s);
    if (first) {
        room->queue[to->queued++] = key;
    } else {
        rise(room->heap, to->heaped++, key);
    }
}

/* The usual case of one replica, and the lightest server is in the heap: it stays there with a new key. */
static bool
place_one(Lightest *from, const Layer *layer, double value, int32_t *server, PlaceRoom *room)
{
    if (from->fresh < layer->servers || from->heaped == 0
        || (from->queued > 0 && room->queue[from->queued - 1] < room->heap[0])) {
        return false;
    }
    int32_t s = server_of(room->heap[0]);
    *server = s;
    room->filled[s] += value;
    if (--room->left[s] == 0) {
        drop_top(room->heap, &from->heaped);
    } else {
        replace_top(room->heap, from->heaped, key_of(layer, room, s));
    }
    return true;
}

typedef struct {
    int32_t *replica; /* of another expert; NULL: none */
    int32_t from;
    int32_t to;
    double value;
} Shift;

/* All servers with free slots have the expert: moves a replica of another one from a server that lacks it to one with
 * a free slot, with the lowest peak of the two servers. */
static Shift
find_shift(const Layer *layer, int32_t expert, double value, const int64_t *count, int32_t *server,
           const ptrdiff_t *start, PlaceRoom *room)
{
    ptrdiff_t experts = layer->experts;
    memset(room->held, 0, (size_t)(layer->servers * experts));
    for (ptrdiff_t e = 0; e < experts; e++) {
        for (int64_t i = 0; i < count[e]; i++) {
            int32_t s = server[start[e] + i];
            if (s >= 0) {
                room->held[s * experts + e] = 1;
            }
        }
    }
    Shift best = {NULL, -1, -1, 0};
    double lowest = INFINITY;
    for (ptrdiff_t e = 0; e < experts; e++) {
        double part = layer->load[e] / (double)count[e];
        for (int64_t i = 0; i < count[e]; i++) {
            int32_t s = server[start[e] + i];
            if (s < 0 || room->held[s * experts + expert]) {
                continue;
            }
            double here = (room->filled[s] - part + value) / layer->speed[s];
            for (ptrdiff_t t = 0; t < layer->servers; t++) {
                if (room->left[t] == 0 || room->held[t * experts + e]) {
                    continue;
                }
                double peak = fmax(here, (room->filled[t] + part) / layer->speed[t]);
                if (peak < lowest) {
                    lowest = peak;
                    best = (Shift){server + start[e] + i, s, (int32_t)t, part};
                }
            }
        }
    }
    return best;
}

/* The servers of all replicas; `sort_by_load` comes before, once for any number of counts. Each expert has a
 * server if the slots, counted up to one per expert and server, are as many as the replicas. */
static void
place(const Layer *layer, const int64_t *count, const int64_t *slots, int32_t *server, PlaceRoom *room)
{
    Lightest lightest = {0, 0, 0};
    ptrdiff_t replicas = 0;
    /* Beginning of each expert's replicas, in the scratch of the sorting, which is over. */
    ptrdiff_t *start = (ptrdiff_t *)room->sorting;
    sort_by_replica(layer, count, room);
    for (ptrdiff_t e = 0; e < layer->experts; e++) {
        start[e] = replicas;
        replicas += count[e];
    }
    memset(server, 0xff, (size_t)replicas * sizeof(*server));
    room->alike = true;
    for (ptrdiff_t s = 0; s < layer->servers; s++) {
        room->filled[s] = 0;
        room->left[s] = slots[s];
        room->alike &= layer->speed[s] == layer->speed[0];
    }
    if (!room->alike) {
        lightest.fresh = layer->servers;
        for (ptrdiff_t s = 0; s < layer->servers; s++) {
            if (slots[s] > 0) {
                room->heap[lightest.heaped++] = (uint64_t)s;
            }
        }
    }
    for (ptrdiff_t i = 0; i < layer->experts; i++) {
        int32_t e = expert_of(room->order[i]);
        double value = count[e] == 1 ? layer->load[e] : layer->load[e] / (double)count[e];
        int32_t *mine = server + start[e];
        if (count[e] == 1 && place_one(&lightest, layer, value, mine, room)) {
            continue;
        }
        ptrdiff_t before_queue = lightest.queued, before_heap = lightest.heaped;
        bool fresh = lightest.fresh < layer->servers;
        int64_t got = 0;
        for (; got < count[e]; got++) {
            int32_t s = take_lightest(&lightest, layer, room);
            if (s < 0) {
                break;
            }
            mine[got] = s;
        }
        /* Returned only after all are taken: no server is taken twice. */
        bool first = fresh && lightest.queued == before_queue && lightest.heaped == before_heap;
        for (int64_t j = 0; j < got; j++) {
            room->filled[mine[j]] += value;
            room->left[mine[j]]--;
            give_back(&lightest, mine[j], first, layer, room);
        }
        for (; got < count[e]; got++) {
            Shift shift = find_shift(layer, e, value, count, server, start, room);
            if (shift.replica == NULL) {
                break;
            }
            *shift.replica = shift.to;
            mine[got] = shift.from;
            room->filled[shift.from] += value - shift.value;
            room->filled[shift.to] += shift.value;
            room->left[shift.to]--;
            /* Keys have changed: rebuilds the heap of servers with free slots. */
            lightest = (Lightest){layer->servers, 0, 0};
            for (ptrdiff_t t = 0; t < layer->servers; t++) {
                if (room->left[t] > 0) {
                    rise(room->heap, lightest.heaped++, key_of(layer, room, (int32_t)t));
                }
            }
        }
    }
}

/* The servers (N, L, P) for counts (N, L, E) and slots (N, L, S) of N plans. */
EXPORT int
place_layers(const double *load_LE, const int64_t *count, const int64_t *slots, const double *speed_S, int32_t *server,
             ptrdiff_t plans, ptrdiff_t layers, ptrdiff_t experts, ptrdiff_t servers, ptrdiff_t replicas)
{
    if (!counts_fit(count, plans * layers, experts, replicas)) {
        return OUT_OF_RANGE;
    }
    if ((uint64_t)servers > SERVER_BITS || (uint64_t)experts > EXPERT_BITS) {
        return TOO_MANY;
    }
    size_t s = (size_t)servers, e = (size_t)experts;
    char *memory = malloc(s * (sizeof(double) + sizeof(int64_t) + 2 * sizeof(uint64_t)) + e * 3 * sizeof(uint64_t)
                          + s * e);
    if (memory == NULL) {
        return NO_MEMORY;
    }
    PlaceRoom room = {.by_load = (uint64_t *)memory};
    room.order = room.by_load + e;
    room.sorting = room.order + e;
    room.heap = room.sorting + e;
    room.queue = room.heap + s;
    room.filled = (double *)(room.queue + s);
    room.left = (int64_t *)(room.filled + s);
    room.held = (uint8_t *)(room.left + s);
    for (ptrdiff_t l = 0; l < layers; l++) {
        Layer layer = {experts, servers, load_LE + l * experts, speed_S};
        sort_by_load(&layer, &room);
        for (ptrdiff_t at = l; at < plans * layers; at += layers) {
            place(&layer, count + at * experts, slots + at * servers, server + at * replicas, &room);
        }
    }
    free(memory);
    return DONE;
}
