/* Exchanges between the server with the peak and others, after a greedy packing. */
#include "planning.h"

#include <math.h>

#include "keys.h"

#define TRIED 16 /* least filled servers that are tried for an exchange */

typedef struct {
    double *filled;  /* by server */
    double *level;   /* by server: filled over its speed */
    uint64_t *heap;  /* by server */
    double *value;   /* by replica */
    int32_t *owner;  /* by replica */
    int32_t *listed; /* by replica: those of server 0, then those of server 1, ... */
    int32_t *start;  /* by server, and the end: where its replicas begin in that list */
    int32_t *next;   /* by server */
} RefineRoom;

static bool
holds_expert(const RefineRoom *room, int32_t s, int32_t expert)
{
    for (int32_t i = room->start[s]; i < room->start[s + 1]; i++) {
        if (room->owner[room->listed[i]] == expert) {
            return true;
        }
    }
    return false;
}

/* The exchange of a replica of `hot` for one of `cold` with the lowest resulting peak of the two. */
static double
best_exchange(const Layer *layer, const RefineRoom *room, int32_t hot, int32_t cold, int32_t *given, int32_t *got)
{
    double lowest = INFINITY;
    for (int32_t i = room->start[hot]; i < room->start[hot + 1]; i++) {
        for (int32_t j = room->start[cold]; j < room->start[cold + 1]; j++) {
            int32_t a = room->listed[i], b = room->listed[j];
            double less = room->value[a] - room->value[b];
            double here = (room->filled[hot] - less) / layer->speed[hot];
            double there = (room->filled[cold] + less) / layer->speed[cold];
            double peak = here > there ? here : there;
            if (less > 0 && peak < lowest && !holds_expert(room, cold, room->owner[a])
                && !holds_expert(room, hot, room->owner[b])) {
                lowest = peak;
                *given = i;
                *got = j;
            }
        }
    }
    return lowest;
}

/* Up to `budget` times: exchanges a replica of the peak's server with the least filled server for which that lowers
 * the higher of the two. Ends if that is none of the first few. */
static void
refine(const Layer *layer, const int64_t *count, int32_t *server, int64_t budget, RefineRoom *room)
{
    ptrdiff_t servers = layer->servers, replicas = 0;
    for (ptrdiff_t s = 0; s < servers; s++) {
        room->filled[s] = 0;
        room->start[s + 1] = 0;
    }
    for (ptrdiff_t e = 0; e < layer->experts; e++) {
        int64_t placed = 0;
        for (int64_t i = 0; i < count[e]; i++) {
            placed += server[replicas + i] >= 0;
        }
        for (int64_t i = 0; i < count[e]; i++, replicas++) {
            room->owner[replicas] = (int32_t)e;
            room->value[replicas] = layer->load[e] / (double)placed;
            int32_t s = server[replicas];
            if (s >= 0) {
                room->filled[s] += room->value[replicas];
                room->start[s + 1]++;
            }
        }
    }
    room->start[0] = 0;
    for (ptrdiff_t s = 0; s < servers; s++) {
        room->start[s + 1] += room->start[s];
        room->next[s] = room->start[s];
    }
    for (ptrdiff_t r = 0; r < replicas; r++) {
        if (server[r] >= 0) {
            room->listed[room->next[server[r]]++] = (int32_t)r;
        }
    }
    for (int64_t done = 0; done < budget; done++) {
        int32_t hot = 0, cold = 0, given = 0, got = 0;
        for (int32_t s = 0; s < servers; s++) {
            room->level[s] = room->filled[s] / layer->speed[s];
            hot = room->level[s] > room->level[hot] ? s : hot;
            cold = room->level[s] < room->level[cold] ? s : cold;
        }
        /* Ignores gains from rounding. */
        double below = room->level[hot] * (1 - 1e-9);
        bool found = best_exchange(layer, room, hot, cold, &given, &got) < below;
        for (int32_t s = 0; !found && s < servers; s++) {
            rise(room->heap, s, key_of(room->level[s], s));
        }
        for (ptrdiff_t size = servers, tried = 0; !found && tried < TRIED && size > 0; tried++) {
            cold = item_of(room->heap[0]);
            drop_top(room->heap, &size);
            found = cold != hot && best_exchange(layer, room, hot, cold, &given, &got) < below;
        }
        if (!found) {
            break;
        }
        int32_t a = room->listed[given], b = room->listed[got];
        room->listed[given] = b;
        room->listed[got] = a;
        server[a] = cold;
        server[b] = hot;
        room->filled[hot] += room->value[b] - room->value[a];
        room->filled[cold] += room->value[a] - room->value[b];
    }
}

/* Changes `server` (L, P) by `budget` exchanges per layer at most. */
EXPORT int
refine_layers(const double *load_LE, const int64_t *count_LE, const double *speed_S, int64_t budget, int32_t *server,
              ptrdiff_t layers, ptrdiff_t experts, ptrdiff_t servers, ptrdiff_t replicas)
{
    if (!counts_fit(count_LE, layers, experts, replicas) || !servers_fit(server, layers * replicas, servers)) {
        return OUT_OF_RANGE;
    }
    size_t s = (size_t)servers, p = (size_t)replicas;
    if (servers > MOST_ITEMS) {
        return TOO_MANY;
    }
    uint64_t *memory = malloc(s * (sizeof(uint64_t) + 2 * sizeof(double)) + p * (sizeof(double) + 2 * sizeof(int32_t))
                           + (2 * s + 1) * sizeof(int32_t));
    if (memory == NULL) {
        return NO_MEMORY;
    }
    RefineRoom room = {.heap = memory};
    room.filled = (double *)(room.heap + s);
    room.level = room.filled + s;
    room.value = room.level + s;
    room.owner = (int32_t *)(room.value + p);
    room.listed = room.owner + p;
    room.start = room.listed + p;
    room.next = room.start + s + 1;
    for (ptrdiff_t l = 0; l < layers; l++) {
        Layer layer = {experts, servers, load_LE + l * experts, speed_S};
        refine(&layer, count_LE + l * experts, server + l * replicas, budget, &room);
    }
    free(memory);
    return DONE;
}
