/* Puts the replicas of each expert on different nodes and racks. Each server keeps its number of replicas, each expert
 * its own.
 *
 *   cost   of a layout: what the k-th replica of an expert in a group (node or rack) costs, and 1 a load. It does
 *          not fall with k, so the least cost is that of a flow from experts over racks and nodes to servers.
 *   cycle  servers pass experts on, each to the next. Without a cycle of negative cost no layout with these counts
 *          costs less (M. Klein, A primal method for minimal cost flows, Management Science 14, 1967).
 *   swap   a cycle of two servers
 *
 * Swaps come first, because they can keep the servers' loads. Longer cycles repair what no swap repairs. */
#include "planning.h"

#include <math.h>
#include <string.h>

#include "held.h"

enum { NODE, RACK, GROUPINGS };

/* An expert in one group only, and a replica that shares its group; by grouping. A load costs 1. Each counts more than
 * thousands of the next. */
static const int64_t ONE_GROUP[] = {INT64_C(1) << 50, INT64_C(1) << 40};
static const int64_t SHARED[] = {INT64_C(1) << 28, INT64_C(1) << 14};

/* More than the loads of a swap, less than all else. */
#define LOADS (INT64_C(1) << 13)

/* Rounded sums of loads are not above the peak. */
#define ROUNDING (1 + 1e-9)

typedef struct {
    ptrdiff_t experts, servers;
    int64_t spread_over; /* Up to so many replicas of an expert go to different groups. */
    int32_t groups[GROUPINGS];
    const int32_t *group_S[GROUPINGS];
    const double *load_E, *speed_S;
    const uint8_t *current, *fixed; /* NULL: unknown; none */
    uint8_t *holds;
    double *shares; /* NULL: equal */
    int32_t *on_EG[GROUPINGS]; /* an expert's replicas in a group */
    int64_t *count_E;
    double *load_S;
    double peak;
    HeldList list;
    /* For cycles, by server. */
    int64_t *distance_S;
    int32_t *before_S, *passed_S, *queue;
    uint8_t *queued_S;
} AntiAffinity;

typedef struct {
    int32_t e, from, to;
} Pass;

static int64_t
unit(const AntiAffinity *a, int g, int32_t e, int32_t group, int32_t more)
{
    int64_t replicas = a->count_E[e], k = a->on_EG[g][(ptrdiff_t)e * a->groups[g] + group] + more;
    if (replicas < 2 || a->groups[g] < 2) {
        return 0;
    }
    return (k >= replicas ? ONE_GROUP[g] : 0) + (k > 1 && replicas <= a->spread_over ? SHARED[g] : 0);
}

/* Whether a replica of the expert costs something where it is, but for loads. */
static bool
costs(const AntiAffinity *a, int32_t e, int32_t s)
{
    return unit(a, NODE, e, a->group_S[NODE][s], 0) + unit(a, RACK, e, a->group_S[RACK][s], 0) > 0;
}

/* Change of the cost if a replica is passed on. */
static int64_t
cost_of(const AntiAffinity *a, Pass pass)
{
    int64_t cost = 0;
    if (a->current != NULL) {
        cost += a->current[pass.from * a->experts + pass.e] - a->current[pass.to * a->experts + pass.e];
    }
    for (int g = NODE; g <= RACK; g++) {
        int32_t here = a->group_S[g][pass.from], there = a->group_S[g][pass.to];
        cost += here == there ? 0 : unit(a, g, pass.e, there, 1) - unit(a, g, pass.e, here, 0);
    }
    return cost;
}

static double
part(const AntiAffinity *a, int32_t s, int32_t e)
{
    double share = a->shares != NULL ? a->shares[s * a->experts + e] : 1.0 / (double)a->count_E[e];
    return a->load_E[e] * share;
}

static bool
is_fixed(const AntiAffinity *a, int32_t s, int32_t e)
{
    return a->fixed != NULL && a->fixed[s * a->experts + e];
}

static double
level(const AntiAffinity *a, int32_t s)
{
    return a->load_S[s] / a->speed_S[s];
}

/* Counts what is where. Returns the peak. */
static double
count_layer(AntiAffinity *a)
{
    double peak = 0;
    list_held(a->holds, a->servers, a->experts, &a->list);
    count_held(&a->list, a->servers, a->experts, a->count_E);
    for (int g = NODE; g <= RACK; g++) {
        memset(a->on_EG[g], 0, (size_t)(a->experts * a->groups[g]) * sizeof(int32_t));
    }
    for (int32_t s = 0; s < a->servers; s++) {
        a->load_S[s] = 0;
        for (int32_t i = a->list.first[s]; i < a->list.first[s + 1]; i++) {
            int32_t e = a->list.expert[i];
            a->load_S[s] += part(a, s, e);
            for (int g = NODE; g <= RACK; g++) {
                a->on_EG[g][(ptrdiff_t)e * a->groups[g] + a->group_S[g][s]]++;
            }
        }
        peak = level(a, s) > peak ? level(a, s) : peak;
    }
    return peak;
}

static void
replace(int32_t *list, int32_t old, int32_t new)
{
    while (*list != old) {
        list++;
    }
    *list = new;
}

/* Servers pass experts on. Each server of the cycle gets what the one after it in the list passes. */
static void
pass_on(AntiAffinity *a, const Pass *cycle, ptrdiff_t length)
{
    for (ptrdiff_t i = 0; i < length; i++) {
        int32_t e = cycle[i].e, from = cycle[i].from, to = cycle[i].to;
        ptrdiff_t old = from * a->experts + e, new = to * a->experts + e;
        replace(a->list.expert + a->list.first[from], e, cycle[(i + 1) % length].e);
        a->load_S[from] -= part(a, from, e);
        a->holds[old] = 0;
        a->holds[new] = 1;
        if (a->shares != NULL) {
            a->shares[new] = a->shares[old];
            a->shares[old] = 0;
        }
        a->load_S[to] += part(a, to, e);
        for (int g = NODE; g <= RACK; g++) {
            a->on_EG[g][(ptrdiff_t)e * a->groups[g] + a->group_S[g][from]]--;
            a->on_EG[g][(ptrdiff_t)e * a->groups[g] + a->group_S[g][to]]++;
        }
    }
}

/* ---- swaps -------------------------------------------------------------------------------------------------- */

typedef struct {
    Pass both[2];
    double over; /* level of the fuller of the two above the peak; 0: not above */
    int64_t cost;
    double uneven; /* difference of the two replicas' loads */
} Swap;

static bool
is_better(const Swap *one, const Swap *other)
{
    if (one->over != other->over) {
        return one->over < other->over;
    }
    return one->cost != other->cost ? one->cost < other->cost : one->uneven < other->uneven;
}

/* Improves `best` by swaps of a server's replica that cost less than `limit`, with the servers from `turn` on. */
static void
find_swap(const AntiAffinity *a, int32_t e, int32_t s, int32_t turn, int64_t limit, Swap *best)
{
    for (int32_t i = 0; i < a->servers && !is_fixed(a, s, e); i++) {
        int32_t t = (turn + i) % (int32_t)a->servers;
        Swap swap = {.both = {{e, s, t}, {-1, t, s}}};
        int64_t cost = a->holds[t * a->experts + e] ? limit : cost_of(a, swap.both[0]);
        for (int32_t at = a->list.first[t]; cost < limit && at < a->list.first[t + 1]; at++) {
            int32_t f = swap.both[1].e = a->list.expert[at];
            if (a->holds[s * a->experts + f] || is_fixed(a, t, f)) {
                continue;
            }
            swap.cost = cost + cost_of(a, swap.both[1]);
            if (swap.cost >= limit) {
                continue;
            }
            double more = part(a, t, f) - part(a, s, e);
            double here = (a->load_S[s] + more) / a->speed_S[s], there = (a->load_S[t] - more) / a->speed_S[t];
            double worst = here > there ? here : there;
            swap.uneven = fabs(more);
            /* Equal replicas leave the peak where it is: enough to separate them. */
            swap.over = worst > a->peak * ROUNDING && (swap.uneven > 0 || limit > 0) ? worst : 0;
            if (is_better(&swap, best)) {
                *best = swap;
            }
        }
        if (best->uneven == 0 && a->current == NULL && limit < 0) {
            return;
        }
    }
}

/* Swaps that lower the cost; of these, those with the least rise of the peak. */
static void
separate(AntiAffinity *a, int32_t layer)
{
    for (int32_t e = 0; e < a->experts; e++) {
        Swap best;
        do {
            best = (Swap){.over = INFINITY, .uneven = INFINITY};
            for (int32_t s = 0; s < a->servers && (best.uneven > 0 || a->current != NULL); s++) {
                if (a->holds[s * a->experts + e] && costs(a, e, s)) {
                    /* In turn, so that a lost server's experts have their other replicas on many. */
                    find_swap(a, e, s, (e + layer) % (int32_t)a->servers, -LOADS, &best);
                }
            }
            pass_on(a, best.both, isinf(best.over) ? 0 : 2);
        } while (!isinf(best.over));
    }
}

/* Swaps that put the loads above the first peak back below it, as far as they cost nothing. Whether some stay above. */
static bool
lower_peak(AntiAffinity *a)
{
    for (ptrdiff_t round = 0; round < a->servers; round++) {
        int32_t s = 0;
        for (int32_t i = 1; i < a->servers; i++) {
            s = level(a, i) > level(a, s) ? i : s;
        }
        if (level(a, s) <= a->peak * ROUNDING) {
            return false;
        }
        Swap best = {.over = level(a, s), .cost = INT64_MIN, .uneven = INFINITY};
        for (int32_t i = a->list.first[s]; i < a->list.first[s + 1]; i++) {
            find_swap(a, a->list.expert[i], s, 0, LOADS, &best);
        }
        if (isinf(best.uneven)) {
            return true;
        }
        pass_on(a, best.both, 2);
    }
    return true;
}

/* ---- rows --------------------------------------------------------------------------------------------------- */

static int64_t
row_cost(const AntiAffinity *a, int32_t from, int32_t to)
{
    int64_t cost = 0;
    for (int32_t i = a->list.first[from]; i < a->list.first[from + 1]; i++) {
        Pass pass = {a->list.expert[i], from, to};
        cost += a->holds[to * a->experts + pass.e] ? 0 : cost_of(a, pass);
    }
    return cost;
}

static void
swap_rows(AntiAffinity *a, int32_t s, int32_t t)
{
    for (int32_t e = 0; e < a->experts; e++) {
        ptrdiff_t one = s * a->experts + e, other = t * a->experts + e;
        uint8_t here = a->holds[one], there = a->holds[other];
        a->holds[one] = there;
        a->holds[other] = here;
        if (a->shares != NULL) {
            double share = a->shares[one];
            a->shares[one] = a->shares[other];
            a->shares[other] = share;
        }
        for (int g = NODE; g <= RACK; g++) {
            a->on_EG[g][(ptrdiff_t)e * a->groups[g] + a->group_S[g][s]] += there - here;
            a->on_EG[g][(ptrdiff_t)e * a->groups[g] + a->group_S[g][t]] += here - there;
        }
    }
    for (int32_t i = a->list.first[s], j = a->list.first[t]; i < a->list.first[s + 1]; i++, j++) {
        int32_t e = a->list.expert[i];
        a->list.expert[i] = a->list.expert[j];
        a->list.expert[j] = e;
    }
    double load = a->load_S[s];
    a->load_S[s] = a->load_S[t];
    a->load_S[t] = load;
}

/* Equal servers exchange all they hold, which changes no load. */
static void
exchange_rows(AntiAffinity *a, const int64_t *slots_S)
{
    const int32_t *first = a->list.first;
    for (int32_t e = 0; e < a->experts; e++) {
        for (int32_t s = 0; s < a->servers; s++) {
            for (int32_t t = 0; t < a->servers && a->holds[s * a->experts + e] && costs(a, e, s); t++) {
                bool alike = a->speed_S[s] == a->speed_S[t] && slots_S[s] == slots_S[t];
                if (alike && first[s + 1] - first[s] == first[t + 1] - first[t] &&
                    row_cost(a, s, t) + row_cost(a, t, s) < 0) {
                    swap_rows(a, s, t);
                }
            }
        }
    }
}

/* ---- cycles ------------------------------------------------------------------------------------------------- */

/* A cycle that passes an expert on twice may cost something other than the sum. It is two cycles then. Keeps one that
 * lowers the cost; returns its length. */
static ptrdiff_t
shorten(const AntiAffinity *a, Pass *cycle, ptrdiff_t length)
{
    for (ptrdiff_t i = 0; i < length; i++) {
        for (ptrdiff_t j = i + 1; j < length; j++) {
            if (cycle[i].e != cycle[j].e) {
                continue;
            }
            Pass inner = {cycle[i].e, cycle[i].from, cycle[j].to}, outer = {cycle[i].e, cycle[j].from, cycle[i].to};
            int64_t cost = cost_of(a, inner);
            if (cost + cost_of(a, outer) > cost_of(a, cycle[i]) + cost_of(a, cycle[j])) {
                continue;
            }
            for (ptrdiff_t k = i + 1; k < j; k++) {
                cost += cost_of(a, cycle[k]);
            }
            if (cost < 0) {
                cycle[i] = inner;
                memmove(cycle, cycle + i, (size_t)(j - i) * sizeof(Pass));
                length = j - i;
            } else {
                cycle[i] = outer;
                memmove(cycle + i + 1, cycle + j + 1, (size_t)(length - j - 1) * sizeof(Pass));
                length -= j - i;
            }
            i = 0;
            j = 0;
        }
    }
    return length;
}

/* The cycle that ends at a server, backwards. */
static ptrdiff_t
collect(const AntiAffinity *a, int32_t end, Pass *cycle)
{
    ptrdiff_t length = 0;
    int32_t to = end;
    do {
        cycle[length++] = (Pass){a->passed_S[to], a->before_S[to], to};
        to = a->before_S[to];
    } while (to != end);
    return shorten(a, cycle, length);
}

/* Whether a server can begin a cycle of negative cost. */
static bool
is_misplaced(const AntiAffinity *a, int32_t s)
{
    for (int32_t i = a->list.first[s]; i < a->list.first[s + 1]; i++) {
        int32_t e = a->list.expert[i];
        if (costs(a, e, s) || (a->current != NULL && !a->current[s * a->experts + e])) {
            return true;
        }
    }
    return false;
}

/* A cycle of negative cost, by shortest paths (R. Bellman, L. Ford); its length, or 0: there is none. */
static ptrdiff_t
find_cycle(AntiAffinity *a, Pass *cycle)
{
    ptrdiff_t head = 0, size = 0;
    for (int32_t s = 0; s < a->servers; s++) {
        a->distance_S[s] = 0;
        a->before_S[s] = -1;
        a->queued_S[s] = is_misplaced(a, s);
        a->queue[size] = s;
        size += a->queued_S[s];
    }
    for (; size > 0; size--) {
        int32_t s = a->queue[head];
        head = (head + 1) % a->servers;
        a->queued_S[s] = 0;
        for (int32_t i = a->list.first[s]; i < a->list.first[s + 1]; i++) {
            Pass pass = {.e = a->list.expert[i], .from = s};
            for (; pass.to < a->servers && !is_fixed(a, s, pass.e); pass.to++) {
                int32_t t = pass.to, v = s;
                int64_t distance = a->distance_S[s] + (a->holds[t * a->experts + pass.e] ? 0 : cost_of(a, pass));
                if (a->holds[t * a->experts + pass.e] || distance >= a->distance_S[t]) {
                    continue;
                }
                a->distance_S[t] = distance;
                while (v >= 0 && v != t) {
                    v = a->before_S[v];
                }
                a->before_S[t] = s;
                a->passed_S[t] = pass.e;
                if (v == t) {
                    return collect(a, t, cycle);
                }
                if (!a->queued_S[t]) {
                    a->queue[(head + size - 1) % a->servers] = t;
                    a->queued_S[t] = 1;
                    size++;
                }
            }
        }
    }
    return 0;
}

/* ---- layers ------------------------------------------------------------------------------------------------- */

/* Changes holds and shares (L, S, E; shares may be NULL: equal) so that replicas of an expert are on different nodes.
 *
 * group_GS numbers the servers' nodes, then their racks, without gaps (all 0: unknown). Experts with up to
 * `spread_over` replicas get a node for each, others two at least. Fixed replicas (NULL: none) stay. Of equal swaps
 * those with fewer loads from `current` (NULL: unknown) are taken; with `save`, cycles save loads, whatever the peak.
 * `rows`: servers of a layer with the same slots, count and speed may exchange all they hold. risen_L: whether the
 * layer's peak load has risen. */
EXPORT int
anti_affinity_layers(const double *load_LE, const int64_t *slots_LS, const double *speed_S, const int32_t *group_GS,
                     int64_t spread_over, bool save, bool rows, const uint8_t *current, const uint8_t *fixed,
                     uint8_t *holds, double *shares, bool *risen_L, ptrdiff_t layers, ptrdiff_t servers,
                     ptrdiff_t experts, ptrdiff_t groupings)
{
    if (groupings != GROUPINGS) {
        return OUT_OF_RANGE;
    }
    AntiAffinity a = {.experts = experts, .servers = servers, .spread_over = spread_over, .speed_S = speed_S};
    a.groups[NODE] = a.groups[RACK] = 1;
    for (int g = NODE; g <= RACK; g++) {
        a.group_S[g] = group_GS + g * servers;
        for (ptrdiff_t s = 0; s < servers; s++) {
            if (a.group_S[g][s] < 0 || a.group_S[g][s] >= servers) {
                return OUT_OF_RANGE;
            }
            a.groups[g] = a.group_S[g][s] >= a.groups[g] ? a.group_S[g][s] + 1 : a.groups[g];
        }
    }
    if (!list_fits(servers, experts)) {
        return TOO_MANY;
    }
    size_t e = (size_t)experts, s = (size_t)servers, nodes = (size_t)a.groups[NODE], racks = (size_t)a.groups[RACK];
    int64_t *memory = malloc((e + 2 * s) * sizeof(int64_t) + (e * (nodes + racks) + 3 * s) * sizeof(int32_t) +
                             s * sizeof(Pass) + list_bytes(servers, experts) + s);
    if (memory == NULL) {
        return NO_MEMORY;
    }
    a.count_E = memory;
    a.distance_S = a.count_E + e;
    a.load_S = (double *)(a.distance_S + s);
    a.on_EG[NODE] = (int32_t *)(a.load_S + s);
    a.on_EG[RACK] = a.on_EG[NODE] + e * nodes;
    a.before_S = a.on_EG[RACK] + e * racks;
    a.passed_S = a.before_S + s;
    a.queue = a.passed_S + s;
    Pass *cycle = (Pass *)(a.queue + s);
    a.list = list_in(cycle + s, servers);
    a.queued_S = (uint8_t *)a.list.first + list_bytes(servers, experts);
    for (ptrdiff_t l = 0, size = servers * experts; l < layers; l++) {
        a.load_E = load_LE + l * experts;
        a.holds = holds + l * size;
        a.shares = shares == NULL ? NULL : shares + l * size;
        a.fixed = fixed == NULL ? NULL : fixed + l * size;
        a.current = current == NULL || !save ? NULL : current + l * size;
        a.peak = count_layer(&a);
        risen_L[l] = false;
        int32_t first = 0;
        while (first < servers && !is_misplaced(&a, first)) {
            first++;
        }
        if (first == servers) {
            continue;
        }
        a.current = current == NULL ? NULL : current + l * size;
        if (rows && fixed == NULL) {
            exchange_rows(&a, slots_LS + l * servers);
        }
        separate(&a, (int32_t)l);
        a.current = save ? a.current : NULL;
        for (ptrdiff_t length; (length = find_cycle(&a, cycle)) > 0;) {
            pass_on(&a, cycle, length);
        }
        risen_L[l] = lower_peak(&a);
    }
    free(memory);
    return DONE;
}
