/* ScalpeLB: its swaps, and whether layers need more than those. */
#include "planning.h"

#include <math.h>

#include "held.h"

/* Loads of servers, an expert's load in equal parts on those that hold it. */
static void
load_of_held(const Layer *layer, const HeldList *list, const int64_t *count, double *filled)
{
    for (ptrdiff_t s = 0; s < layer->servers; s++) {
        double sum = 0;
        for (int32_t i = list->first[s]; i < list->first[s + 1]; i++) {
            sum += layer->load[list->expert[i]] / (double)count[list->expert[i]];
        }
        filled[s] = sum;
    }
}

/* While that lowers the peak, and at most `budget` times: swaps the hottest expert of the hottest server with the
 * coldest of the coldest. */
static void
swap_hottest(const Layer *layer, uint8_t *holds, int64_t budget, double *filled, double *fullness, int64_t *count,
             HeldList *list)
{
    ptrdiff_t experts = layer->experts, servers = layer->servers;
    list_held(holds, servers, experts, list);
    count_held(list, servers, experts, count);
    load_of_held(layer, list, count, filled);
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
            return;
        }
        double hot_after = filled[hot] - most + least, cold_after = filled[cold] + most - least;
        double peak = fmax(hot_after / layer->speed[hot], cold_after / layer->speed[cold]);
        /* Ignores gains from rounding. */
        if (!(peak < fullness[hot] * (1 - 1e-12))) {
            return;
        }
        from[hottest] = to[coldest] = 0;
        from[coldest] = to[hottest] = 1;
        filled[hot] = hot_after;
        filled[cold] = cold_after;
        fullness[hot] = hot_after / layer->speed[hot];
        fullness[cold] = cold_after / layer->speed[cold];
    }
}

/* Changes `holds` (L, S, E) by `budget` swaps per layer at most. */
EXPORT int
swap_layers(const double *load_LE, const double *speed_S, int64_t budget, uint8_t *holds, ptrdiff_t layers,
            ptrdiff_t servers, ptrdiff_t experts)
{
    if (!list_fits(servers, experts)) {
        return TOO_MANY;
    }
    double *filled = malloc((size_t)(2 * servers + experts) * sizeof(*filled) + list_bytes(servers, experts));
    if (filled == NULL) {
        return NO_MEMORY;
    }
    int64_t *count = (int64_t *)(filled + 2 * servers);
    HeldList list = list_in(count + experts, servers);
    for (ptrdiff_t l = 0; l < layers; l++) {
        Layer layer = {experts, servers, load_LE + l * experts, speed_S};
        swap_hottest(&layer, holds + l * servers * experts, budget, filled, filled + servers, count, &list);
    }
    free(filled);
    return DONE;
}
