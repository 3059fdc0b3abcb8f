/* Layouts as bits: loads, and ScalpeLB's swaps. */
#include "planning.h"

#include <math.h>
#include <string.h>

#include "held.h"

void
count_held(const uint8_t *holds, ptrdiff_t servers, ptrdiff_t experts, int64_t *count)
{
    memset(count, 0, (size_t)experts * sizeof(*count));
    for (ptrdiff_t s = 0; s < servers; s++) {
        const uint8_t *row = holds + s * experts;
        for (ptrdiff_t e = next_held(row, 0, experts); e < experts; e = next_held(row, e + 1, experts)) {
            count[e]++;
        }
    }
}

/* How many are held that were not. */
int64_t
count_new(const uint8_t *holds, const uint8_t *current, ptrdiff_t size)
{
    int64_t found = 0;
    ptrdiff_t at = 0;
    for (; at + 8 <= size; at += 8) {
        uint64_t now, before;
        memcpy(&now, holds + at, 8);
        memcpy(&before, current + at, 8);
        found += __builtin_popcountll(now & ~before);
    }
    for (; at < size; at++) {
        found += holds[at] & ~current[at] & 1;
    }
    return found;
}

/* Loads of servers. What is held is found first, so that the shares, which lie far apart, arrive side by side.
 * `room`: for servers + servers x experts. */
void
server_load(const Layer *layer, const uint8_t *holds, const double *shares, double *filled, int32_t *room)
{
    ptrdiff_t experts = layer->experts, servers = layer->servers;
    int32_t *end = room, *held = room + servers, found = 0;
    for (ptrdiff_t s = 0; s < servers; s++) {
        const uint8_t *row = holds + s * experts;
        for (ptrdiff_t e = next_held(row, 0, experts); e < experts; e = next_held(row, e + 1, experts)) {
            __builtin_prefetch(shares + s * experts + e);
            held[found++] = (int32_t)e;
        }
        end[s] = found;
    }
    for (ptrdiff_t s = 0, i = 0; s < servers; s++) {
        double sum = 0;
        for (; i < end[s]; i++) {
            sum += layer->load[held[i]] * shares[s * experts + held[i]];
        }
        filled[s] = sum;
    }
}

/* Loads of servers, an expert's load in equal parts on those that hold it. Returns whether none holds more than its
 * slots; slots may be NULL. */
bool
held_load(const Layer *layer, const uint8_t *holds, const int64_t *count, const int64_t *slots, double *filled)
{
    ptrdiff_t experts = layer->experts;
    bool fits = true;
    for (ptrdiff_t s = 0; s < layer->servers; s++) {
        const uint8_t *row = holds + s * experts;
        int64_t held = 0;
        filled[s] = 0;
        for (ptrdiff_t e = next_held(row, 0, experts); e < experts; e = next_held(row, e + 1, experts)) {
            filled[s] += layer->load[e] / (double)count[e];
            held++;
        }
        fits &= slots == NULL || held <= slots[s];
    }
    return fits;
}

void
equal_shares(const uint8_t *holds, ptrdiff_t servers, ptrdiff_t experts, const int64_t *count, double *shares)
{
    for (ptrdiff_t s = 0; s < servers; s++) {
        const uint8_t *row = holds + s * experts;
        for (ptrdiff_t e = next_held(row, 0, experts); e < experts; e = next_held(row, e + 1, experts)) {
            shares[s * experts + e] = 1.0 / (double)count[e];
        }
    }
}

/* While it lowers the peak, and `budget` times at most: the hottest expert of the hottest server changes places
 * with the coldest of the coldest. Returns how often. */
int64_t
swap_hottest(const Layer *layer, uint8_t *holds, int64_t budget, double *filled, double *fullness, int64_t *count)
{
    ptrdiff_t experts = layer->experts, servers = layer->servers;
    count_held(holds, servers, experts, count);
    held_load(layer, holds, count, NULL, filled);
    for (ptrdiff_t s = 0; s < servers; s++) {
        fullness[s] = filled[s] / layer->speed[s];
    }
    for (int64_t swaps = 0; swaps < budget; swaps++) {
        ptrdiff_t hot = 0, cold = 0, hottest = -1, coldest = -1;
        double most = -1, least = INFINITY;
        for (ptrdiff_t s = 1; s < servers; s++) {
            hot = fullness[s] > fullness[hot] ? s : hot;
            cold = fullness[s] < fullness[cold] ? s : cold;
        }
        uint8_t *from = holds + hot * experts, *to = holds + cold * experts;
        for (ptrdiff_t e = 0; e < experts; e++) {
            if (from[e] == to[e]) {
                continue; /* None of both, or no second replica there. */
            }
            double value = layer->load[e] / (double)count[e];
            if (from[e] && value > most) {
                most = value;
                hottest = e;
            }
            if (to[e] && value < least) {
                least = value;
                coldest = e;
            }
        }
        if (hottest < 0 || coldest < 0) {
            return swaps;
        }
        double hot_after = filled[hot] - most + least, cold_after = filled[cold] + most - least;
        double peak = fmax(hot_after / layer->speed[hot], cold_after / layer->speed[cold]);
        /* Rounding alone is no gain. */
        if (!(peak < fullness[hot] * (1 - 1e-12))) {
            return swaps;
        }
        from[hottest] = to[coldest] = 0;
        from[coldest] = to[hottest] = 1;
        filled[hot] = hot_after;
        filled[cold] = cold_after;
        fullness[hot] = hot_after / layer->speed[hot];
        fullness[cold] = cold_after / layer->speed[cold];
    }
    return budget;
}
