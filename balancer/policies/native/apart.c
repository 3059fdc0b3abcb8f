/* Puts the replicas of each expert on different nodes and racks. Each server keeps its number of replicas, each expert
 * its own.
 *
 *   unit   what the k-th replica of an expert on one node (or in one rack) costs. It does not fall with k, so the least
 *          cost is that of a flow from experts over racks and nodes to servers.
 *   swap   two servers exchange two experts
 *   cycle  servers pass experts around a cycle. Without a cycle of negative cost no layout with these counts costs less
 *          (M. Klein, A primal method for minimal cost flows, Management Science 14, 1967).
 *
 * Swaps come first, because they can keep the servers' loads. Cycles repair what no swap repairs. */
#include "planning.h"

#include <string.h>

#include "held.h"

/* An expert on one node only, in one rack only; a replica that shares its node, its rack. Each counts more than all of
 * the next. */
enum { RACK_SHARED = 1 };
static const int64_t NODE_SHARED = INT64_C(1) << 18, RACK_ALONE = INT64_C(1) << 36, NODE_ALONE = INT64_C(1) << 48;

/* Rounded sums of loads are not above the peak. */
#define ROUNDING (1 + 1e-9)

typedef struct {
    ptrdiff_t experts;
    ptrdiff_t servers;
    int32_t nodes;
    int32_t racks;
    const int32_t *node_S;
    const int32_t *rack_N;
    int64_t apart;         /* Up to so many replicas of an expert go to different nodes. */
    bool rows;             /* Whether servers may exchange all they hold. */
    const double *load_E;
    const double *speed_S;
    const uint8_t *current; /* NULL: unknown */
    const uint8_t *fixed;   /* NULL: none */
    uint8_t *holds;
    double *shares; /* NULL: equal */
    int32_t *server_N, *first_N; /* servers by node */
    int32_t *node_K, *first_K;   /* nodes by rack */
    int32_t *on_EN, *in_EK;      /* replicas on a node, in a rack */
    int32_t *holder, *first_E;   /* servers by expert */
    int64_t *count_E;
    double *load_S;
    double peak;
    HeldList list;
    /* For cycles, by vertex. */
    int64_t *distance;
    int32_t *before, *queue;
    uint8_t *queued;
} Apart;

static inline int64_t
unit(const Apart *a, int64_t replicas, int32_t k, int64_t alone, int64_t shared)
{
    if (replicas < 2) {
        return 0;
    }
    return (k >= replicas ? alone : 0) + (k > 1 && replicas <= a->apart ? shared : 0);
}

static inline int64_t
node_unit(const Apart *a, int32_t e, int32_t n, int32_t more)
{
    return unit(a, a->count_E[e], a->on_EN[(ptrdiff_t)e * a->nodes + n] + more, NODE_ALONE, NODE_SHARED);
}

static inline int64_t
rack_unit(const Apart *a, int32_t e, int32_t k, int32_t more)
{
    if (a->racks < 2) {
        return 0;
    }
    return unit(a, a->count_E[e], a->in_EK[(ptrdiff_t)e * a->racks + k] + more, RACK_ALONE, RACK_SHARED);
}

/* Change of the cost if a replica moves from one server to another. */
static inline int64_t
move_cost(const Apart *a, int32_t e, int32_t from, int32_t to)
{
    int32_t n = a->node_S[from], m = a->node_S[to];
    if (n == m) {
        return 0;
    }
    int64_t cost = node_unit(a, e, m, 1) - node_unit(a, e, n, 0);
    int32_t k = a->rack_N[n], l = a->rack_N[m];
    return k == l ? cost : cost + rack_unit(a, e, l, 1) - rack_unit(a, e, k, 0);
}

static inline double
part(const Apart *a, int32_t s, int32_t e)
{
    double share = a->shares != NULL ? a->shares[s * a->experts + e] : 1.0 / (double)a->count_E[e];
    return a->load_E[e] * share;
}

static inline bool
is_fixed(const Apart *a, int32_t s, int32_t e)
{
    return a->fixed != NULL && a->fixed[s * a->experts + e];
}

/* Loads that the move of a replica adds; -1: it saves one. */
static inline int
loads(const Apart *a, int32_t e, int32_t from, int32_t to)
{
    if (a->current == NULL) {
        return 0;
    }
    return a->current[from * a->experts + e] - a->current[to * a->experts + e];
}

static void
count_layer(Apart *a)
{
    ptrdiff_t experts = a->experts;
    list_held(a->holds, a->servers, experts, &a->list);
    count_held(&a->list, a->servers, experts, a->count_E);
    memset(a->on_EN, 0, (size_t)(experts * a->nodes) * sizeof(int32_t));
    memset(a->in_EK, 0, (size_t)(experts * a->racks) * sizeof(int32_t));
    int32_t found = 0;
    for (ptrdiff_t e = 0; e < experts; e++) {
        a->first_E[e] = found;
        found += (int32_t)a->count_E[e];
    }
    a->first_E[experts] = found;
    a->peak = 0;
    for (int32_t s = 0; s < a->servers; s++) {
        int32_t n = a->node_S[s], k = a->rack_N[n];
        for (int32_t i = a->list.first[s]; i < a->list.first[s + 1]; i++) {
            int32_t e = a->list.expert[i];
            a->on_EN[(ptrdiff_t)e * a->nodes + n]++;
            if (a->racks > 1) {
                a->in_EK[(ptrdiff_t)e * a->racks + k]++;
            }
            a->holder[a->first_E[e]++] = s;
        }
    }
    memmove(a->first_E + 1, a->first_E, (size_t)experts * sizeof(int32_t));
    a->first_E[0] = 0;
}

static void
add_loads(Apart *a)
{
    for (int32_t s = 0; s < a->servers; s++) {
        double sum = 0;
        for (int32_t i = a->list.first[s]; i < a->list.first[s + 1]; i++) {
            sum += part(a, s, a->list.expert[i]);
        }
        a->load_S[s] = sum;
        a->peak = sum / a->speed_S[s] > a->peak ? sum / a->speed_S[s] : a->peak;
    }
}

/* Whether a replica of the expert costs something where it is. */
static inline bool
costs(const Apart *a, int32_t e, int32_t s)
{
    int32_t n = a->node_S[s];
    return node_unit(a, e, n, 0) + rack_unit(a, e, a->rack_N[n], 0) > 0;
}

static bool
expert_costs(const Apart *a, int32_t e)
{
    for (int32_t i = a->first_E[e]; a->count_E[e] > 1 && i < a->first_E[e + 1]; i++) {
        if (costs(a, e, a->holder[i])) {
            return true;
        }
    }
    return false;
}

static void
replace(int32_t *list, int32_t old, int32_t new)
{
    while (*list != old) {
        list++;
    }
    *list = new;
}

/* A replica changes its server; the server's list is the caller's. */
static void
move(Apart *a, int32_t e, int32_t from, int32_t to)
{
    ptrdiff_t old = from * a->experts + e, new = to * a->experts + e;
    int32_t n = a->node_S[from], m = a->node_S[to];
    a->holds[old] = 0;
    a->holds[new] = 1;
    if (a->shares != NULL) {
        a->shares[new] = a->shares[old];
        a->shares[old] = 0;
    }
    a->on_EN[(ptrdiff_t)e * a->nodes + n]--;
    a->on_EN[(ptrdiff_t)e * a->nodes + m]++;
    if (a->racks > 1) {
        a->in_EK[(ptrdiff_t)e * a->racks + a->rack_N[n]]--;
        a->in_EK[(ptrdiff_t)e * a->racks + a->rack_N[m]]++;
    }
    replace(a->holder + a->first_E[e], from, to);
}

typedef struct {
    int32_t s, t, e, f; /* e from s to t, f from t to s */
    double over;        /* load of the fuller of the two above the peak, over its speed; 0: not above */
    int64_t cost;
    int loads;
    double uneven; /* difference of the two replicas' loads */
} Swap;

static bool
is_better(const Swap *one, const Swap *other)
{
    if (one->over != other->over) {
        return one->over < other->over;
    }
    if (one->cost != other->cost) {
        return one->cost < other->cost;
    }
    if (one->loads != other->loads) {
        return one->loads < other->loads;
    }
    return one->uneven < other->uneven;
}

static void
rate(const Apart *a, Swap *swap)
{
    int32_t s = swap->s, t = swap->t;
    double more = part(a, t, swap->f) - part(a, s, swap->e);
    double here = (a->load_S[s] + more) / a->speed_S[s], there = (a->load_S[t] - more) / a->speed_S[t];
    double worst = here > there ? here : there;
    swap->uneven = more < 0 ? -more : more;
    swap->over = worst > a->peak * ROUNDING && swap->uneven > 0 ? worst : 0;
    swap->loads = loads(a, swap->e, s, t) + loads(a, swap->f, t, s);
}

static void
apply(Apart *a, const Swap *swap)
{
    int32_t s = swap->s, t = swap->t;
    double more = part(a, t, swap->f) - part(a, s, swap->e);
    a->load_S[s] += more;
    a->load_S[t] -= more;
    replace(a->list.expert + a->list.first[s], swap->e, swap->f);
    replace(a->list.expert + a->list.first[t], swap->f, swap->e);
    move(a, swap->e, s, t);
    move(a, swap->f, t, s);
}

/* The best swap that lowers the cost by moving the expert; -1 as its expert: there is none. */
static Swap
best_swap(const Apart *a, int32_t e, int32_t turn)
{
    Swap best = {.e = -1};
    for (int32_t i = a->first_E[e]; i < a->first_E[e + 1]; i++) {
        int32_t s = a->holder[i];
        if (!costs(a, e, s) || is_fixed(a, s, e)) {
            continue;
        }
        for (int32_t j = 0; j < a->servers; j++) {
            int32_t t = (turn + j) % (int32_t)a->servers;
            int64_t cost = a->holds[t * a->experts + e] ? 0 : move_cost(a, e, s, t);
            if (cost >= 0) {
                continue;
            }
            for (int32_t at = a->list.first[t]; at < a->list.first[t + 1]; at++) {
                int32_t f = a->list.expert[at];
                if (a->holds[s * a->experts + f] || is_fixed(a, t, f)) {
                    continue;
                }
                Swap swap = {.s = s, .t = t, .e = e, .f = f, .cost = cost + move_cost(a, f, t, s)};
                if (swap.cost >= 0) {
                    continue;
                }
                rate(a, &swap);
                if (best.e < 0 || is_better(&swap, &best)) {
                    best = swap;
                    if (swap.uneven == 0 && a->current == NULL) {
                        return best;
                    }
                }
            }
        }
    }
    return best;
}

static void
swap_experts(Apart *a, int32_t layer)
{
    for (int32_t e = 0; e < a->experts; e++) {
        while (expert_costs(a, e)) {
            /* In turn, so that a lost server's experts have their other replicas on many. */
            Swap swap = best_swap(a, e, (e + layer) % (int32_t)a->servers);
            if (swap.e < 0) {
                break;
            }
            apply(a, &swap);
        }
    }
}

/* Swaps that put the loads above the first peak back below it, as far as they cost nothing. Whether some stay above. */
static bool
lower_peak(Apart *a)
{
    for (ptrdiff_t round = 0; round < a->servers; round++) {
        int32_t s = 0;
        for (int32_t i = 1; i < a->servers; i++) {
            s = a->load_S[i] / a->speed_S[i] > a->load_S[s] / a->speed_S[s] ? i : s;
        }
        double now = a->load_S[s] / a->speed_S[s];
        if (now <= a->peak * ROUNDING) {
            return false;
        }
        Swap best = {.e = -1, .over = now};
        for (int32_t i = a->list.first[s]; i < a->list.first[s + 1]; i++) {
            int32_t e = a->list.expert[i];
            for (int32_t t = 0; t < a->servers && !is_fixed(a, s, e); t++) {
                if (a->holds[t * a->experts + e]) {
                    continue;
                }
                int64_t cost = move_cost(a, e, s, t);
                for (int32_t at = a->list.first[t]; at < a->list.first[t + 1]; at++) {
                    int32_t f = a->list.expert[at];
                    Swap swap = {.s = s, .t = t, .e = e, .f = f};
                    if (a->holds[s * a->experts + f] || is_fixed(a, t, f)) {
                        continue;
                    }
                    rate(a, &swap);
                    if (swap.over < best.over && cost + move_cost(a, f, t, s) <= 0) {
                        best = swap;
                    }
                }
            }
        }
        if (best.e < 0) {
            return true;
        }
        apply(a, &best);
    }
    return true;
}

/* ---- rows --------------------------------------------------------------------------------------------------- */

static int64_t
row_cost(const Apart *a, int32_t from, int32_t to)
{
    int64_t cost = 0;
    for (int32_t i = a->list.first[from]; i < a->list.first[from + 1]; i++) {
        int32_t e = a->list.expert[i];
        cost += a->holds[to * a->experts + e] ? 0 : move_cost(a, e, from, to);
    }
    return cost;
}

static bool
rows_fit(const Apart *a, int32_t s, int32_t t, const int64_t *slots_S)
{
    const int32_t *first = a->list.first;
    return a->speed_S[s] == a->speed_S[t] && slots_S[s] == slots_S[t] && first[s + 1] - first[s] == first[t + 1] - first[t];
}

static void
swap_rows(Apart *a, int32_t s, int32_t t)
{
    int32_t *here = a->list.expert + a->list.first[s], *there = a->list.expert + a->list.first[t];
    int32_t held = a->list.first[s + 1] - a->list.first[s];
    for (int32_t i = 0; i < held; i++) {
        int32_t e = here[i], f = there[i];
        here[i] = f;
        there[i] = e;
    }
    for (int32_t i = 0; i < held; i++) {
        /* Those that both hold exchange their shares only. */
        int32_t e = there[i];
        ptrdiff_t old = s * a->experts + e, new = t * a->experts + e;
        if (!a->holds[new]) {
            move(a, e, s, t);
        } else if (a->shares != NULL) {
            double share = a->shares[old];
            a->shares[old] = a->shares[new];
            a->shares[new] = share;
        }
    }
    for (int32_t i = 0; i < held; i++) {
        int32_t f = here[i];
        bool moved_here = false;
        for (int32_t j = 0; j < held && !moved_here; j++) {
            moved_here = there[j] == f;
        }
        if (!moved_here) {
            move(a, f, t, s);
        }
    }
    double load = a->load_S[s];
    a->load_S[s] = a->load_S[t];
    a->load_S[t] = load;
}

/* Equal servers exchange all they hold, which changes no load. */
static void
exchange_rows(Apart *a, const int64_t *slots_S)
{
    for (int32_t e = 0; e < a->experts; e++) {
        bool improved = expert_costs(a, e);
        while (improved) {
            improved = false;
            for (int32_t i = a->first_E[e]; i < a->first_E[e + 1] && !improved; i++) {
                int32_t s = a->holder[i];
                if (!costs(a, e, s)) {
                    continue;
                }
                for (int32_t t = 0; t < a->servers && !improved; t++) {
                    if (a->node_S[s] != a->node_S[t] && rows_fit(a, s, t, slots_S) &&
                        row_cost(a, s, t) + row_cost(a, t, s) < 0) {
                        swap_rows(a, s, t);
                        improved = true;
                    }
                }
            }
        }
    }
}

/* ---- cycles ------------------------------------------------------------------------------------------------- */

/* Vertices: servers, then experts on a node, experts in a rack, and experts. Edges: a server passes one of its experts
 * on, within the node, within the rack, or anywhere. */

static inline int32_t
vertex_node(const Apart *a, int32_t e, int32_t n)
{
    return (int32_t)(a->servers + (ptrdiff_t)e * a->nodes + n);
}

static inline int32_t
vertex_rack(const Apart *a, int32_t e, int32_t k)
{
    return (int32_t)(a->servers + a->experts * a->nodes + (ptrdiff_t)e * a->racks + k);
}

static inline int32_t
vertex_expert(const Apart *a, int32_t e)
{
    return (int32_t)(a->servers + a->experts * (a->nodes + a->racks) + e);
}

static inline ptrdiff_t
vertices(const Apart *a)
{
    return a->servers + a->experts * (a->nodes + a->racks + 1);
}

typedef struct {
    ptrdiff_t head, size;
    int32_t found; /* a vertex of a cycle; -1: none yet */
} Search;

static void
relax(Apart *a, Search *search, int32_t from, int32_t to, int64_t cost)
{
    int64_t distance = a->distance[from] + cost;
    if (search->found >= 0 || distance >= a->distance[to]) {
        return;
    }
    a->distance[to] = distance;
    for (int32_t v = from; v >= 0; v = a->before[v]) {
        if (v == to) {
            a->before[to] = from;
            search->found = to;
            return;
        }
    }
    a->before[to] = from;
    if (!a->queued[to]) {
        ptrdiff_t all = vertices(a), end = search->head + search->size++;
        a->queue[end < all ? end : end - all] = to;
        a->queued[to] = 1;
    }
}

static void
relax_from(Apart *a, Search *search, int32_t v)
{
    ptrdiff_t at = v - a->servers;
    if (at < 0) {
        for (int32_t i = a->list.first[v]; i < a->list.first[v + 1]; i++) {
            int32_t e = a->list.expert[i];
            if (!is_fixed(a, v, e)) {
                relax(a, search, v, vertex_node(a, e, a->node_S[v]), 0);
            }
        }
        return;
    }
    if (at < a->experts * a->nodes) {
        int32_t e = (int32_t)(at / a->nodes), n = (int32_t)(at % a->nodes);
        for (int32_t i = a->first_N[n]; i < a->first_N[n + 1]; i++) {
            int32_t s = a->server_N[i];
            if (!a->holds[s * a->experts + e]) {
                relax(a, search, v, s, 0);
            }
        }
        if (a->on_EN[at] > 0) {
            relax(a, search, v, vertex_rack(a, e, a->rack_N[n]), -node_unit(a, e, n, 0));
        }
        return;
    }
    at -= a->experts * a->nodes;
    if (at < a->experts * a->racks) {
        int32_t e = (int32_t)(at / a->racks), k = (int32_t)(at % a->racks);
        for (int32_t i = a->first_K[k]; i < a->first_K[k + 1]; i++) {
            int32_t n = a->node_K[i];
            relax(a, search, v, vertex_node(a, e, n), node_unit(a, e, n, 1));
        }
        if (a->in_EK[at] > 0) {
            relax(a, search, v, vertex_expert(a, e), -rack_unit(a, e, k, 0));
        }
        return;
    }
    int32_t e = (int32_t)(at - a->experts * a->racks);
    for (int32_t k = 0; k < a->racks; k++) {
        relax(a, search, v, vertex_rack(a, e, k), rack_unit(a, e, k, 1));
    }
}

/* A vertex of a cycle of negative cost; -1: there is none. `before` leads around it, backwards. */
static int32_t
find_cycle(Apart *a)
{
    ptrdiff_t all = vertices(a);
    memset(a->distance, 0, (size_t)all * sizeof(*a->distance));
    memset(a->before, 0xff, (size_t)all * sizeof(*a->before));
    memset(a->queued, 0, (size_t)all);
    Search search = {.found = -1};
    /* Only what costs something can begin a cycle. */
    for (int32_t e = 0; e < a->experts; e++) {
        for (int32_t i = a->first_E[e]; i < a->first_E[e + 1]; i++) {
            int32_t n = a->node_S[a->holder[i]], both[] = {vertex_node(a, e, n), vertex_rack(a, e, a->rack_N[n])};
            for (int j = 0; j < 2 && costs(a, e, a->holder[i]); j++) {
                if (!a->queued[both[j]]) {
                    a->queue[search.size++] = both[j];
                    a->queued[both[j]] = 1;
                }
            }
        }
    }
    while (search.size > 0 && search.found < 0) {
        int32_t v = a->queue[search.head];
        search.head = search.head + 1 < all ? search.head + 1 : 0;
        search.size--;
        a->queued[v] = 0;
        relax_from(a, &search, v);
    }
    return search.found;
}

/* Whether servers have passed experts around a cycle that lowers the cost. */
static bool
pass_around(Apart *a)
{
    int32_t v = find_cycle(a);
    if (v < 0) {
        return false;
    }
    while (v >= a->servers) {
        v = a->before[v];
    }
    /* Backwards from a server: the vertex after each server says which expert it passes on. */
    int32_t first = v, to = v, e = -1;
    ptrdiff_t moves = 0;
    do {
        v = a->before[v];
        if (v >= a->servers) {
            ptrdiff_t at = v - a->servers;
            e = at < a->experts * a->nodes ? (int32_t)(at / a->nodes) : e;
            continue;
        }
        a->queue[3 * moves] = e;
        a->queue[3 * moves + 1] = v;
        a->queue[3 * moves++ + 2] = to;
        to = v;
    } while (v != first);
    for (ptrdiff_t i = 0; i < moves; i++) {
        move(a, a->queue[3 * i], a->queue[3 * i + 1], a->queue[3 * i + 2]);
    }
    double peak = a->peak;
    count_layer(a);
    add_loads(a);
    a->peak = peak;
    return true;
}

/* Whether nothing costs anything, or as many experts are on one node only as must be. */
static bool
is_best(const Apart *a)
{
    int64_t alone = 0, least = 0;
    bool other = false;
    for (int32_t e = 0; e < a->experts; e++) {
        if (a->count_E[e] < 2 || !expert_costs(a, e)) {
            continue;
        }
        int32_t n = a->node_S[a->holder[a->first_E[e]]];
        bool on_one = a->on_EN[(ptrdiff_t)e * a->nodes + n] == a->count_E[e];
        alone += on_one;
        other |= !on_one || (a->count_E[e] > 2 && a->count_E[e] <= a->apart);
    }
    if (alone == 0 || other || a->racks > 1) {
        return alone == 0 && !other;
    }
    for (int32_t n = 0; n < a->nodes; n++) {
        int64_t more = 0, size = a->first_N[n + 1] - a->first_N[n];
        for (int32_t i = a->first_N[n]; i < a->first_N[n + 1]; i++) {
            more += a->list.first[a->server_N[i] + 1] - a->list.first[a->server_N[i]];
        }
        for (int32_t e = 0; e < a->experts; e++) {
            int64_t most = a->count_E[e] < 2 ? a->count_E[e] : a->count_E[e] - 1;
            more -= most < size ? most : size;
        }
        least += more > 0 ? more : 0;
    }
    return alone == least;
}

/* ---- layers ------------------------------------------------------------------------------------------------- */

static void
group(const int32_t *group_of, ptrdiff_t size, int32_t groups, int32_t *first, int32_t *listed)
{
    int32_t found = 0;
    for (int32_t g = 0; g < groups; g++) {
        first[g] = found;
        for (ptrdiff_t i = 0; i < size; i++) {
            if (group_of[i] == g) {
                listed[found++] = (int32_t)i;
            }
        }
    }
    first[groups] = found;
}

/* Changes holds and shares (L, S, E; shares may be NULL: equal) so that replicas of an expert are on different nodes.
 *
 * node_S numbers the servers' nodes, rack_N the nodes' racks (all 0: unknown), without gaps. Experts with up to `apart`
 * replicas get a node for each, others two at least. Fixed replicas (NULL: none) stay. Of equal swaps those with fewer
 * loads from `current` (NULL: unknown) are taken. `rows`: servers of a layer with the same slots, count and speed may
 * exchange all they hold. result_L: 0, the layer stays; 1, it may have changed; 2, and its peak load has
 * risen from peak_L. */
EXPORT int
apart_layers(const double *load_LE, const int64_t *slots_LS, const double *speed_S, const int32_t *node_S,
             const int32_t *rack_N, int64_t apart, bool rows, const uint8_t *current, const uint8_t *fixed,
             uint8_t *holds, double *shares, int64_t *result_L, double *peak_L, ptrdiff_t layers, ptrdiff_t servers,
             ptrdiff_t experts, ptrdiff_t nodes)
{
    int32_t racks = 0;
    for (ptrdiff_t n = 0; n < nodes; n++) {
        if (rack_N[n] < 0 || rack_N[n] >= nodes) {
            return OUT_OF_RANGE;
        }
        racks = rack_N[n] >= racks ? rack_N[n] + 1 : racks;
    }
    for (ptrdiff_t s = 0; s < servers; s++) {
        if (node_S[s] < 0 || node_S[s] >= nodes) {
            return OUT_OF_RANGE;
        }
    }
    if (!list_fits(servers, experts) || !list_fits(2 * nodes + 1, experts + servers + 1)) {
        return TOO_MANY;
    }
    Apart a = {.experts = experts, .servers = servers, .nodes = (int32_t)nodes, .racks = racks, .node_S = node_S,
               .rack_N = rack_N, .apart = apart, .rows = rows, .speed_S = speed_S};
    size_t e = (size_t)experts, s = (size_t)servers, n = (size_t)nodes, k = (size_t)racks, v = (size_t)vertices(&a);
    size_t ints = 2 * (s + n + k + 2) + 2 * n + e * (n + k) + s * e + e + 1 + v + 3 * (v + s);
    int64_t *memory = malloc((e + v) * sizeof(int64_t) + s * sizeof(double) + ints * sizeof(int32_t) + v +
                             list_bytes(servers, experts));
    if (memory == NULL) {
        return NO_MEMORY;
    }
    a.count_E = memory;
    a.distance = a.count_E + e;
    a.load_S = (double *)(a.distance + v);
    a.server_N = (int32_t *)(a.load_S + s);
    a.first_N = a.server_N + s;
    a.node_K = a.first_N + n + 1;
    a.first_K = a.node_K + n;
    a.on_EN = a.first_K + k + 1;
    a.in_EK = a.on_EN + e * n;
    a.holder = a.in_EK + e * k;
    a.first_E = a.holder + s * e;
    a.before = a.first_E + e + 1;
    a.queue = a.before + v;
    a.list = list_in(a.queue + 3 * (v + s), servers);
    a.queued = (uint8_t *)a.list.first + list_bytes(servers, experts);
    group(node_S, servers, a.nodes, a.first_N, a.server_N);
    group(rack_N, nodes, a.racks, a.first_K, a.node_K);
    for (ptrdiff_t l = 0, size = servers * experts; l < layers; l++) {
        a.load_E = load_LE + l * experts;
        a.holds = holds + l * size;
        a.shares = shares == NULL ? NULL : shares + l * size;
        a.current = current == NULL ? NULL : current + l * size;
        a.fixed = fixed == NULL ? NULL : fixed + l * size;
        count_layer(&a);
        result_L[l] = 0;
        if (is_best(&a)) {
            continue;
        }
        result_L[l] = 1;
        add_loads(&a);
        peak_L[l] = a.peak;
        if (rows && fixed == NULL) {
            exchange_rows(&a, slots_LS + l * servers);
        }
        swap_experts(&a, (int32_t)l);
        while (!is_best(&a) && pass_around(&a)) {
        }
        result_L[l] += lower_peak(&a);
    }
    free(memory);
    return DONE;
}
