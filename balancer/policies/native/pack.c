/* EPLB's packing, with its order of additions and its ties; replicas of one expert may meet on a server. */
#include "planning.h"

#include <string.h>

#include "keys.h"

typedef struct {
    float *filled;   /* by server */
    int64_t *held;   /* by server */
    uint64_t *heap;  /* by server */
    uint64_t *order; /* by replica */
    uint64_t *sorting; /* by replica */
} PackRoom;

/* A non-negative number and an index as one key: the bits of non-negative doubles sort like the numbers. */
static inline uint64_t
key_of(float value, ptrdiff_t index)
{
    uint32_t bits;
    value += 0.0f; /* -0 has other bits than 0 */
    memcpy(&bits, &value, sizeof(bits));
    return (uint64_t)bits << 32 | (uint64_t)index;
}

/* Heaviest first (ties by index), each replica to the least loaded server with a slot (ties by index); `place` is the
 * slot on the server. In single precision, like torch. */
static void
pack(ptrdiff_t servers, const double *value, ptrdiff_t replicas, int64_t slots, int64_t *server, int64_t *place,
     PackRoom *room)
{
    for (ptrdiff_t i = 0; i < replicas; i++) {
        room->order[i] = key_of((float)value[i], i) ^ UINT64_C(0xffffffff) << 32;
    }
    sort_keys(room->order, room->sorting, replicas);
    ptrdiff_t next = 0, size = 0;
    /* The first ones go to empty servers, in turn. */
    for (; next < servers && next < replicas; next++) {
        ptrdiff_t r = (ptrdiff_t)(uint32_t)room->order[next];
        if (!((float)value[r] > 0)) {
            break;
        }
        room->filled[next] = (float)value[r];
        room->held[next] = 1;
        server[r] = next;
        place[r] = 0;
    }
    for (ptrdiff_t s = next; s < servers; s++) {
        room->filled[s] = 0;
        room->held[s] = 0;
    }
    /* The later ones have less. */
    for (ptrdiff_t s = servers; s-- > 0;) {
        if (room->held[s] < slots) {
            rise(room->heap, size++, key_of(room->filled[s], s));
        }
    }
    for (; next < replicas && size > 0; next++) {
        ptrdiff_t s = (ptrdiff_t)(uint32_t)room->heap[0], r = (ptrdiff_t)(uint32_t)room->order[next];
        room->filled[s] += (float)value[r];
        server[r] = s;
        place[r] = room->held[s];
        if (++room->held[s] == slots) {
            drop_top(room->heap, &size);
        } else {
            replace_top(room->heap, size, key_of(room->filled[s], s));
        }
    }
}

/* Exchanges replicas of equal load if that separates two replicas of one expert: no server's load changes. */
static void
separate(ptrdiff_t replicas, ptrdiff_t servers, ptrdiff_t experts, const double *value, const int64_t *expert,
         int64_t *server, int64_t *place, uint16_t *held)
{
    memset(held, 0, (size_t)(servers * experts) * sizeof(*held));
    bool any = false;
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
            here[expert[i]]--, there[expert[j]]--;
            here[expert[j]]++, there[expert[i]]++;
            int64_t other = server[j], there_at = place[j];
            server[j] = server[i], place[j] = place[i];
            server[i] = other, place[i] = there_at;
            break;
        }
    }
}

/* Packs the replicas of each layer, P / S to a server; `server` and `place` are (L, P). With `expert` (L, P; NULL:
 * none) replicas of one expert are separated. */
EXPORT int
pack_layers(const double *value, const int64_t *expert, int64_t *server, int64_t *place, ptrdiff_t servers,
            ptrdiff_t experts, ptrdiff_t layers, ptrdiff_t replicas)
{
    if (servers < 1 || replicas % servers != 0 || (expert != NULL && !within(expert, layers * replicas, experts))) {
        return OUT_OF_RANGE;
    }
    size_t s = (size_t)servers, r = (size_t)replicas;
    uint64_t *memory = malloc((s + 2 * r) * sizeof(uint64_t) + s * (sizeof(int64_t) + sizeof(float)));
    uint16_t *held = malloc(s * (size_t)experts * sizeof(*held) + 1);
    PackRoom room = {.heap = memory, .order = memory + s};
    room.sorting = room.order + r;
    room.held = (int64_t *)(room.sorting + r);
    room.filled = (float *)(room.held + s);
    bool fits = memory != NULL && held != NULL;
    for (ptrdiff_t at = 0; fits && at < layers * replicas; at += replicas) {
        pack(servers, value + at, replicas, replicas / servers, server + at, place + at, &room);
        if (expert != NULL) {
            separate(replicas, servers, experts, value + at, expert + at, server + at, place + at, held);
        }
    }
    free(memory);
    free(held);
    return fits ? DONE : NO_MEMORY;
}
