/* Packs for any slots, heaviest first, with an expert's replicas on different servers. */
#include "planning.h"

#include <math.h>
#include <string.h>

#include "keys.h"

typedef struct {
    double *filled;    /* by server */
    int64_t *left;     /* by server */
    uint64_t *order;   /* by expert */
    uint64_t *sorting; /* by expert */
    uint64_t *heap;    /* by server: those with free slots, the least filled first */
    ptrdiff_t *start;  /* by expert: its first replica */
    uint8_t *held;     /* servers x experts */
    bool alike;        /* all servers are equally fast */
    bool single;       /* single precision, like torch */
} PlaceRoom;

static inline uint64_t
server_key(const Layer *layer, const PlaceRoom *room, ptrdiff_t s)
{
    /* A division would take longer than the rest, and every placement would wait for it. */
    return key_of(room->alike ? room->filled[s] : room->filled[s] / layer->speed[s], s);
}

static inline void
fill(PlaceRoom *room, int32_t s, double value)
{
    double sum = room->filled[s] + value;
    room->filled[s] = room->single ? (float)sum : sum;
    room->left[s]--;
}

static ptrdiff_t
fill_heap(const Layer *layer, PlaceRoom *room)
{
    ptrdiff_t size = 0;
    for (ptrdiff_t s = 0; s < layer->servers; s++) {
        if (room->left[s] > 0) {
            rise(room->heap, size++, server_key(layer, room, s));
        }
    }
    return size;
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
           PlaceRoom *room)
{
    const ptrdiff_t *start = room->start;
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

/* The servers of all replicas. Each expert has a server if the slots, counted up to one per expert and server, are as
 * many as the replicas. */
static void
place(const Layer *layer, const int64_t *count, const int64_t *slots, int32_t *server, PlaceRoom *room)
{
    ptrdiff_t replicas = 0;
    for (ptrdiff_t e = 0; e < layer->experts; e++) {
        room->order[e] = falling_key(layer->load[e] / (double)(count[e] > 0 ? count[e] : 1), e);
        room->start[e] = replicas;
        replicas += count[e];
    }
    sort_keys(room->order, room->sorting, layer->experts);
    memset(server, 0xff, (size_t)replicas * sizeof(*server));
    room->alike = true;
    for (ptrdiff_t s = 0; s < layer->servers; s++) {
        room->filled[s] = 0;
        room->left[s] = slots[s];
        room->alike &= layer->speed[s] == layer->speed[0];
    }
    ptrdiff_t size = fill_heap(layer, room);
    for (ptrdiff_t i = 0; i < layer->experts; i++) {
        int32_t e = item_of(room->order[i]), *mine = server + room->start[e];
        double value = layer->load[e] / (double)count[e];
        int64_t got = 0;
        if (count[e] == 1 && size > 0) {
            int32_t s = mine[got++] = item_of(room->heap[0]);
            fill(room, s, value);
            if (room->left[s] > 0) {
                replace_top(room->heap, size, server_key(layer, room, s));
            } else {
                drop_top(room->heap, &size);
            }
            continue;
        }
        for (; got < count[e] && size > 0; got++) {
            mine[got] = item_of(room->heap[0]);
            drop_top(room->heap, &size);
        }
        /* Returned only after all are taken: no server is taken twice. */
        for (int64_t j = 0; j < got; j++) {
            fill(room, mine[j], value);
            if (room->left[mine[j]] > 0) {
                rise(room->heap, size++, server_key(layer, room, mine[j]));
            }
        }
        for (; got < count[e]; got++) {
            Shift shift = find_shift(layer, e, value, count, server, room);
            if (shift.replica == NULL) {
                break;
            }
            *shift.replica = shift.to;
            mine[got] = shift.from;
            room->filled[shift.from] += value - shift.value;
            fill(room, shift.to, shift.value);
            size = fill_heap(layer, room);
        }
    }
}

/* The servers (N, L, P) for counts (N, L, E) and slots (N, L, S) of N plans. */
EXPORT int
place_layers(const double *load_LE, const int64_t *count, const int64_t *slots, const double *speed_S, bool single,
             int32_t *server, ptrdiff_t plans, ptrdiff_t layers, ptrdiff_t experts, ptrdiff_t servers,
             ptrdiff_t replicas)
{
    if (!counts_fit(count, plans * layers, experts, replicas)) {
        return OUT_OF_RANGE;
    }
    if (servers > MOST_ITEMS || experts > MOST_ITEMS) {
        return TOO_MANY;
    }
    size_t s = (size_t)servers, e = (size_t)experts;
    char *memory = malloc(s * (sizeof(double) + sizeof(int64_t) + sizeof(uint64_t)) +
                          e * (2 * sizeof(uint64_t) + sizeof(ptrdiff_t)) + s * e);
    if (memory == NULL) {
        return NO_MEMORY;
    }
    PlaceRoom room = {.single = single, .order = (uint64_t *)memory};
    room.sorting = room.order + e;
    room.heap = room.sorting + e;
    room.filled = (double *)(room.heap + s);
    room.left = (int64_t *)(room.filled + s);
    room.start = (ptrdiff_t *)(room.left + s);
    room.held = (uint8_t *)(room.start + e);
    for (ptrdiff_t at = 0; at < plans * layers; at++) {
        Layer layer = {experts, servers, load_LE + at % layers * experts, speed_S};
        place(&layer, count + at * experts, slots + at * servers, server + at * replicas, &room);
    }
    free(memory);
    return DONE;
}

/* Exchanges replicas of equal load (L, P) if that separates two replicas of one expert (L, P) on a server (L, P). No
 * server's load changes. */
EXPORT int
separate_layers(const double *value, const int64_t *expert, int64_t experts, int64_t servers, int32_t *server,
                ptrdiff_t layers, ptrdiff_t replicas)
{
    ptrdiff_t size = layers * replicas;
    if (servers < 1 || !within(expert, size, experts) || !servers_fit(server, size, servers)) {
        return OUT_OF_RANGE;
    }
    uint16_t *held = malloc((size_t)servers * (size_t)experts * sizeof(*held) + 1);
    for (; held != NULL && layers > 0; layers--, value += replicas, expert += replicas, server += replicas) {
        bool any = false;
        memset(held, 0, (size_t)(servers * experts) * sizeof(*held));
        for (ptrdiff_t i = 0; i < replicas; i++) {
            any |= ++held[server[i] * experts + expert[i]] > 1;
        }
        for (ptrdiff_t i = 0; any && i < replicas; i++) {
            uint16_t *here = held + server[i] * experts;
            for (ptrdiff_t j = 0; j < replicas && here[expert[i]] > 1; j++) {
                uint16_t *there = held + server[j] * experts;
                if (value[j] != value[i] || there[expert[i]] > 0 || here[expert[j]] > 0) {
                    continue;
                }
                here[expert[i]]--;
                there[expert[j]]--;
                here[expert[j]]++;
                there[expert[i]]++;
                int32_t other = server[j];
                server[j] = server[i];
                server[i] = other;
                break;
            }
        }
    }
    bool fits = held != NULL;
    free(held);
    return fits ? DONE : NO_MEMORY;
}
