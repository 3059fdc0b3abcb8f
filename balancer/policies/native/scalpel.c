/* Layouts as bits: loads, and ScalpeLB's swaps. */
#include "planning.h"

#include <math.h>
#include <string.h>

#include "held.h"

/* What each server of a layer holds. */
void
list_held(const uint8_t *holds, ptrdiff_t servers, ptrdiff_t experts, HeldList *list)
{
    int32_t found = 0;
    for (ptrdiff_t s = 0; s < servers; s++) {
        list->first[s] = found;
        found += list_row(holds + s * experts, experts, list->expert + found);
    }
    list->first[servers] = found;
}

void
count_held(const HeldList *list, ptrdiff_t servers, ptrdiff_t experts, int64_t *count)
{
    memset(count, 0, (size_t)experts * sizeof(*count));
    for (int32_t i = 0; i < list->first[servers]; i++) {
        count[list->expert[i]]++;
    }
}

/* The number of held replicas that were not held before. */
int64_t
count_new(const uint8_t *holds, const uint8_t *current, ptrdiff_t size)
{
    int64_t found = 0;
    for (ptrdiff_t at = 0; at < size; at += 255) {
        /* Counted in bytes, as many at once as fit into a byte's sum. */
        ptrdiff_t end = size - at < 255 ? size : at + 255;
        uint8_t some = 0;
        for (ptrdiff_t i = at; i < end; i++) {
            some = (uint8_t)(some + (holds[i] & ~current[i] & 1));
        }
        found += some;
    }
    return found;
}

/* Loads of servers. The shares are far apart in memory: prefetches them. */
void
server_load(const Layer *layer, const HeldList *list, const double *shares, double *filled)
{
    ptrdiff_t experts = layer->experts, servers = layer->servers;
    for (ptrdiff_t s = 0; s < servers; s++) {
        for (int32_t i = list->first[s]; i < list->first[s + 1]; i++) {
            __builtin_prefetch(shares + s * experts + list->expert[i]);
        }
    }
    for (ptrdiff_t s = 0; s < servers; s++) {
        double sum = 0;
        for (int32_t i = list->first[s]; i < list->first[s + 1]; i++) {
            sum += layer->load[list->expert[i]] * shares[s * experts + list->expert[i]];
        }
        filled[s] = sum;
    }
}

/* Loads of servers, an expert's load in equal parts on those that hold it. Returns whether none holds more than its
 * slots; slots may be NULL. */
bool
held_load(const Layer *layer, const HeldList *list, const int64_t *count, const int64_t *slots, double *filled)
{
    bool fits = true;
    for (ptrdiff_t s = 0; s < layer->servers; s++) {
        double sum = 0;
        for (int32_t i = list->first[s]; i < list->first[s + 1]; i++) {
            sum += layer->load[list->expert[i]] / (double)count[list->expert[i]];
        }
        filled[s] = sum;
        fits &= slots == NULL || list->first[s + 1] - list->first[s] <= slots[s];
    }
    return fits;
}

void
equal_shares(const HeldList *list, ptrdiff_t servers, ptrdiff_t experts, const int64_t *count, double *shares)
{
    for (ptrdiff_t s = 0; s < servers; s++) {
        for (int32_t i = list->first[s]; i < list->first[s + 1]; i++) {
            shares[s * experts + list->expert[i]] = 1.0 / (double)count[list->expert[i]];
        }
    }
}

/* While that lowers the peak, and at most `budget` times: swaps the hottest expert of the hottest server with the
 * coldest of the coldest. Returns the number of swaps. */
int64_t
swap_hottest(const Layer *layer, uint8_t *holds, int64_t budget, double *filled, double *fullness, int64_t *count,
             HeldList *list)
{
    ptrdiff_t experts = layer->experts, servers = layer->servers;
    list_held(holds, servers, experts, list);
    count_held(list, servers, experts, count);
    held_load(layer, list, count, NULL, filled);
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
                continue; /* Not held by both servers. */
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
        /* Ignores gains from rounding. */
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
