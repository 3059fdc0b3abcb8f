/* EPLB's packing, with its order of additions and its ties; replicas of one expert may meet on a server. */
#include "planning.h"

#include <string.h>

/* In the given order, each replica to the server that has the least so far (of equal ones the first) and room;
 * `place` counts those of a server. */
void
pack(ptrdiff_t servers, const double *value, const int64_t *order, ptrdiff_t replicas, int64_t room, bool single,
     int64_t *server, int64_t *place, double *filled, int64_t *held, Entry *heap)
{
    ptrdiff_t size = servers;
    for (ptrdiff_t s = 0; s < servers; s++) {
        filled[s] = 0;
        held[s] = 0;
        heap[s] = (Entry){0, (int32_t)s};
    }
    for (ptrdiff_t i = 0; i < replicas && size > 0; i++) {
        int32_t s = heap[0].item;
        double sum = filled[s] + value[order[i]];
        filled[s] = single ? (double)(float)sum : sum;
        server[order[i]] = s;
        place[order[i]] = held[s];
        if (++held[s] == room) {
            pop(heap, &size);
        } else {
            heap[0].key = filled[s];
            sift_down(heap, size, 0);
        }
    }
}

/* Exchanges replicas of equal load where that parts two replicas of one expert: no server's load changes. */
void
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
