/* Fills servers to exactly their parts of one load, preferring what they hold.
 *
 * A server may be filled with any k - 1 whole experts and a piece of one more: the rest can be dealt to the others (see
 * `choose`) as long as it has no more items than their slots, less one each, plus one. Servers are filled in the order
 * of leaves:
 *
 *     leaf       an open server with at most one expert in common with other open ones: that expert's part on it is
 *                determined; the next server along the chain is a leaf after that
 *     deferred   a leaf whose own experts are too much, or too little even with all of the common one; and a server
 *                that holds nothing: all are, without a current layout. The items that the leaves leave are dealt to
 *                them, to each first those that it holds
 *
 * Nodes are dealt to like servers, and then each node's items to its servers.
 */
#include <math.h>
#include <string.h>

#include "items.h"

#define SLACK 1e-9

enum { OPEN, QUEUED, CLOSED };

typedef struct {
    Layer *layer;
    Flow *flow;
    double *rest_E;    /* load not given to any server yet; -1: nothing is left to give */
    double *give_N;    /* loads given to a server, from its first slot on; `given_N` has the experts */
    int32_t *given_N;
    int32_t *slot_N;   /* the slot that holds it already; NONE: it is a load */
    int32_t *gives_S;  /* how many */
    int32_t *open_E;   /* open servers that hold it and have not given it up */
    int32_t *common_S; /* number of a server's experts that others have, too */
    int32_t *queue_S, *late_S;
    int32_t *may_N;    /* whether the server may get the slot's expert */
    int32_t *state_S;
    int32_t queued, late;
    int64_t spare;     /* items that open servers could hold, minus existing ones */
    double load, mean;
    bool anew;         /* no server holds anything */
    Items pool, node, own, out;
} Fill;

static int32_t
slots_of(const Layer *layer, int32_t server)
{
    return layer->first_S[server + 1] - layer->first_S[server];
}

static double
capacity_of(const Fill *fill, int32_t server)
{
    return fill->mean * fill->layer->speed_S[server];
}

static void
give(Fill *fill, int32_t server, int32_t expert, double load)
{
    int32_t at = fill->flow->first_S[server] + fill->gives_S[server]++;
    fill->given_N[at] = expert;
    fill->give_N[at] = load;
}

/* ---- leaves ------------------------------------------------------------------------------------------------- */

static void
queue_leaf(Fill *fill, int32_t server)
{
    if (fill->state_S[server] == OPEN && fill->common_S[server] <= 1) {
        fill->state_S[server] = QUEUED;
        fill->queue_S[fill->queued++] = server;
    }
}

/* The server will not get the slot's expert. */
static void
pass_up(Fill *fill, int32_t slot)
{
    const Flow *flow = fill->flow;
    int32_t expert = flow->expert_N[slot], server = flow->server_N[slot];
    fill->may_N[slot] = 0;
    if (fill->open_E[expert]-- >= 2) {
        fill->common_S[server]--;
        queue_leaf(fill, server);
    }
    if (fill->open_E[expert] == 1) {
        int32_t last = flow->head_E[expert];
        while (!fill->may_N[last]) {
            last = flow->next_N[last];
        }
        fill->common_S[flow->server_N[last]]--;
        queue_leaf(fill, flow->server_N[last]);
    }
}

/* All other servers give the slot's expert up. */
static void
claim(Fill *fill, int32_t slot)
{
    const Flow *flow = fill->flow;
    for (int32_t n = flow->head_E[flow->expert_N[slot]]; n != NONE; n = flow->next_N[n]) {
        if (n != slot && fill->may_N[n]) {
            pass_up(fill, n);
        }
    }
}

/* Gives a leaf its own experts and the missing load of the common one; or defers it. */
static void
close_leaf(Fill *fill, int32_t server)
{
    const Flow *flow = fill->flow;
    double lacks = capacity_of(fill, server), crumb = fill->pool.crumb;
    int32_t own = 0, common = NONE;
    for (int32_t n = flow->first_S[server]; n < flow->first_S[server + 1]; n++) {
        int32_t e = flow->expert_N[n];
        if (e == NONE || !fill->may_N[n]) {
            continue;
        }
        if (fill->open_E[e] > 1) {
            common = n;
        } else {
            lacks -= fill->rest_E[e];
            own++;
        }
    }
    double rest = common == NONE ? 0 : fill->rest_E[flow->expert_N[common]];
    bool exact = (own > 0 || common != NONE) && lacks >= -crumb && lacks <= rest + crumb;
    bool all = common != NONE && lacks >= rest - crumb;
    int64_t spare = fill->spare - (slots_of(fill->layer, server) - 1) + own + (exact && all);
    if (all) {
        claim(fill, common);
    } else if (common != NONE && (!exact || spare < 0)) {
        pass_up(fill, common);
    }
    fill->state_S[server] = CLOSED;
    if (!exact || spare < 0) {
        fill->late_S[fill->late++] = server;
        return;
    }
    fill->spare = spare;
    for (int32_t n = flow->first_S[server]; n < flow->first_S[server + 1]; n++) {
        int32_t e = flow->expert_N[n];
        if (e == NONE || !fill->may_N[n]) {
            continue;
        }
        bool part = n == common && !all;
        if (!part || lacks > crumb) {
            give(fill, server, e, part ? lacks : fill->rest_E[e]);
            fill->rest_E[e] = part ? rest - lacks : -1;
        }
        pass_up(fill, n);
    }
}

/* If no server is a leaf: the one with the most common experts gives up the one that most others have. */
static void
loosen(Fill *fill)
{
    const Flow *flow = fill->flow;
    int32_t most = NONE, slot = NONE;
    for (int32_t s = 0; s < flow->servers; s++) {
        if (fill->state_S[s] == OPEN && (most == NONE || fill->common_S[s] > fill->common_S[most])) {
            most = s;
        }
    }
    for (int32_t n = flow->first_S[most]; n < flow->first_S[most + 1]; n++) {
        int32_t e = flow->expert_N[n];
        if (fill->may_N[n] && (slot == NONE || fill->open_E[e] > fill->open_E[flow->expert_N[slot]])) {
            slot = n;
        }
    }
    pass_up(fill, slot);
}

static void
follow_chains(Fill *fill)
{
    int32_t without = 0;
    for (int32_t s = 0; s < fill->layer->servers; s++) {
        without += fill->state_S[s] == CLOSED;
        queue_leaf(fill, s);
    }
    for (int32_t next = 0; next < fill->layer->servers - without; next++) {
        while (next == fill->queued) {
            loosen(fill);
        }
        close_leaf(fill, fill->queue_S[next]);
    }
}

/* ---- deferred servers --------------------------------------------------------------------------------------- */

/* Moves the server's experts from the pool to `own`, ascending; returns their load. */
static double
take_own(Fill *fill, Items *pool, int32_t server)
{
    const Flow *flow = fill->flow;
    double load = 0;
    fill->own.count = fill->own.empty = 0;
    for (int32_t n = flow->first_S[server]; n < flow->first_S[server + 1]; n++) {
        int32_t e = flow->expert_N[n];
        if (e != NONE && fill->rest_E[e] >= 0) {
            remove_item(pool, fill->rest_E[e], e);
            insert_item(&fill->own, fill->rest_E[e], e);
            load += fill->rest_E[e];
        }
    }
    return load;
}

/* Servers with too much first: the others get what they leave. */
static void
order_late(Fill *fill)
{
    const Flow *flow = fill->flow;
    int32_t front = 0;
    for (int32_t i = 0; i < fill->late; i++) {
        int32_t server = fill->late_S[i];
        double own = 0;
        for (int32_t n = flow->first_S[server]; n < flow->first_S[server + 1]; n++) {
            int32_t e = flow->expert_N[n];
            own += e != NONE && fill->rest_E[e] > 0 ? fill->rest_E[e] : 0;
        }
        if (own > capacity_of(fill, server)) {
            fill->late_S[i] = fill->late_S[front];
            fill->late_S[front++] = server;
        }
    }
}

/* Takes a server from the open ones. Where nothing is held, it is the one whose slots fit the remaining items best, so
 * that enough small and large ones remain for the others: as many items as its slots, or one less, should have its share
 * of the load. */
static int32_t
next_server(const Fill *fill, const Items *pool, int32_t **open_S, int32_t open, double load, double speed)
{
    const Layer *layer = fill->layer;
    int32_t best = 0;
    double best_off = INFINITY;
    for (int32_t i = 0; fill->anew && best_off > 0 && i < open; i++) {
        int32_t slots = slots_of(layer, (*open_S)[i]);
        double fair = load > 0 ? layer->speed_S[(*open_S)[i]] / speed * pool->count : slots - 0.5;
        double off = fair > slots ? fair - slots : fair < slots - 1 ? slots - 1 - fair : 0;
        best = off < best_off ? i : best;
        best_off = off < best_off ? off : best_off;
    }
    int32_t server = (*open_S)[best];
    /* Usually it is the first one. */
    memmove(*open_S + 1, *open_S, (size_t)best * sizeof(int32_t));
    ++*open_S;
    return server;
}

/* Everything left; only the largest items if that is too much. */
static Share
largest(const Items *pool, int32_t slots)
{
    int32_t count = pool->count < slots ? pool->count : slots;
    return (Share){.first = pool->count - count, .count = count, .split = NONE};
}

/* Deals the items of a pool to servers; items without a slot remain. */
static void
deal(Fill *fill, Items *pool, int32_t *open_S, int32_t open)
{
    const Layer *layer = fill->layer;
    Items *own = &fill->own, *out = &fill->out;
    double speed = 0, load = add_up(pool);
    for (int32_t i = 0; i < open; i++) {
        speed += layer->speed_S[open_S[i]];
    }
    for (; open > 0; open--) {
        int32_t server = next_server(fill, pool, &open_S, open, load, speed), slots = slots_of(layer, server);
        load = take_own(fill, pool, server);
        load += add_up(pool);
        double capacity = load * layer->speed_S[server] / speed;
        Share share;
        if (open == 1 || !choose_own(own, pool, capacity, slots - 1, &share)) {
            for (int32_t i = 0; i < own->count; i++) {
                insert_item(pool, own->rest[i], own->expert[i]);
            }
            if (own->count > 0) {
                add_up(pool);
            }
            own->count = 0;
            share = open == 1 ? largest(pool, slots) : choose(pool, capacity, slots - 1);
        }
        take_share(own, pool, &share, out, fill->rest_E);
        for (int32_t i = 0; i < out->count; i++) {
            if (out->expert[i] != NONE) {
                give(fill, server, out->expert[i], out->rest[i]);
            }
        }
        speed -= layer->speed_S[server];
    }
}

/* Deals the pool to nodes, with at most one expert shared with the next node, and none above the limit. Items without a
 * slot on a node go to the next one, as may another part of the same expert. */
static void
deal_to_nodes(Fill *fill)
{
    const Layer *layer = fill->layer;
    Items *pool = &fill->pool, *node_items = &fill->node, *out = &fill->out;
    int32_t *open_S = fill->queue_S;
    double speed = 0;
    int64_t cross_node = 0;
    for (int32_t i = 0; i < fill->late; i++) {
        speed += layer->speed_S[fill->late_S[i]];
    }
    for (int32_t node = 0; node < layer->nodes; node++) {
        int32_t open = 0, whole = 0;
        double node_speed = 0;
        for (int32_t i = 0; i < fill->late; i++) {
            int32_t server = fill->late_S[i];
            if (layer->node_S[server] == node) {
                open_S[open++] = server;
                whole += slots_of(layer, server) - 1;
                node_speed += layer->speed_S[server];
            }
        }
        if (open == 0) {
            continue;
        }
        Share share = {.count = pool->count, .split = NONE};
        double capacity = add_up(pool) * node_speed / speed;
        if (speed > node_speed && cross_node < layer->most_cross_node) {
            share = choose(pool, capacity, whole);
            cross_node++;
        } else if (speed > node_speed && pool->count > whole) {
            int32_t first = windows_below(pool, pool->count - whole + 1, whole, capacity + pool->crumb) - 1;
            share = (Share){.first = first < 0 ? 0 : first, .count = whole, .split = NONE};
        }
        fill->own.count = 0;
        take_share(&fill->own, pool, &share, out, fill->rest_E);
        node_items->count = node_items->empty = node_items->zeros = 0;
        for (int32_t i = 0; i < out->count; i++) {
            insert_item(node_items, out->rest[i], out->expert[i]);
        }
        deal(fill, node_items, open_S, open);
        for (int32_t i = 0; i < node_items->count; i++) {
            double rest = node_items->rest[i];
            for (int32_t j = 0; node_items->expert[i] != NONE && j < pool->count; j++) {
                if (pool->expert[j] == node_items->expert[i]) {
                    rest += pool->rest[j];
                    remove_item(pool, pool->rest[j], pool->expert[j]);
                    break;
                }
            }
            insert_item(pool, rest, node_items->expert[i]);
        }
        speed -= node_speed;
    }
}

/* ---- all ---------------------------------------------------------------------------------------------------- */

static Fill
place_arrays(Layer *layer, Arena *arena, int32_t slots)
{
    Fill fill = {.layer = layer, .flow = layer->flow_B};
    int32_t **by_server[] = {&fill.gives_S, &fill.common_S, &fill.queue_S, &fill.late_S, &fill.state_S};
    for (size_t i = 0; i < sizeof(by_server) / sizeof(*by_server); i++) {
        *by_server[i] = carve(arena, (size_t)layer->servers, sizeof(int32_t));
    }
    fill.given_N = carve(arena, (size_t)slots, sizeof(int32_t));
    fill.slot_N = carve(arena, (size_t)slots, sizeof(int32_t));
    fill.may_N = carve(arena, (size_t)slots, sizeof(int32_t));
    fill.give_N = carve(arena, (size_t)slots, sizeof(double));
    fill.rest_E = carve(arena, (size_t)layer->experts, sizeof(double));
    fill.open_E = carve(arena, (size_t)layer->experts, sizeof(int32_t));
    Items *lists[] = {&fill.pool, &fill.node, &fill.own, &fill.out};
    for (size_t i = 0; i < sizeof(lists) / sizeof(*lists); i++) {
        *lists[i] = make_items(arena, slots + layer->experts + 2);
    }
    return fill;
}

size_t
fill_bytes(const Layer *layer, int32_t slots)
{
    Arena arena = {0};
    Layer copy = *layer;
    place_arrays(&copy, &arena, slots);
    return arena.used;
}

/* Counts what the servers hold, and the slots to spare. */
static void
begin(Fill *fill)
{
    const Layer *layer = fill->layer;
    const Flow *flow = fill->flow;
    fill->spare = 1 - layer->experts;
    for (int32_t e = 0; e < layer->experts; e++) {
        fill->load += fill->rest_E[e] = layer->load_E[e];
        fill->open_E[e] = replicas(flow, e);
    }
    for (int32_t n = 0; n < flow->slots; n++) {
        int32_t e = flow->expert_N[n];
        /* Replicas that the shares so far do not use are no links of a chain. */
        bool unused = e != NONE && fill->open_E[e] > 1 && flow->flow_N[n] <= 2 * LEAST_SHARE;
        fill->may_N[n] = e != NONE && !unused;
        if (unused) {
            fill->open_E[e]--;
        }
    }
    for (int32_t s = 0; s < layer->servers; s++) {
        int32_t slots = slots_of(layer, s);
        fill->spare += slots > 0 ? slots - 1 : 0;
        fill->gives_S[s] = fill->common_S[s] = 0;
        fill->state_S[s] = slots > 0 ? OPEN : CLOSED;
        for (int32_t n = layer->first_S[s]; n < layer->first_S[s + 1]; n++) {
            fill->common_S[s] += fill->may_N[n] && fill->open_E[flow->expert_N[n]] > 1;
        }
    }
    fill->mean = fill->load / layer->speed;
    fill->pool.crumb = fill->node.crumb = fill->load * CRUMB;
}

static void
give_all(Fill *fill)
{
    follow_chains(fill);
    if (fill->late == 0) {
        return;
    }
    sort_experts(&fill->pool, fill->rest_E, fill->layer->experts, (int32_t)fill->spare);
    if (fill->layer->node_S != NULL) {
        deal_to_nodes(fill);
        return;
    }
    order_late(fill);
    deal(fill, &fill->pool, fill->late_S, fill->late);
}

/* Finds which replicas are held already; returns the number of the others. */
static int64_t
count_loads(Fill *fill)
{
    const Flow *flow = fill->flow;
    int64_t loads = 0;
    for (int32_t s = 0; s < flow->servers; s++) {
        for (int32_t i = flow->first_S[s]; i < flow->first_S[s] + fill->gives_S[s]; i++) {
            int32_t slot = flow->head_E[fill->given_N[i]];
            while (slot != NONE && flow->server_N[slot] != s) {
                slot = flow->next_N[slot];
            }
            fill->slot_N[i] = slot;
            loads += slot == NONE;
        }
    }
    return loads;
}

/* Fullness of the fullest server over the mean; INFINITY: an expert is not given. */
static double
judge(const Fill *fill)
{
    const Flow *flow = fill->flow;
    double fullest = 0;
    for (int32_t s = 0; s < flow->servers; s++) {
        double load = 0;
        for (int32_t i = flow->first_S[s]; i < flow->first_S[s] + fill->gives_S[s]; i++) {
            load += fill->give_N[i];
        }
        fullest = fmax(fullest, load / capacity_of(fill, s));
    }
    for (int32_t e = 0; e < flow->experts; e++) {
        fullest = fill->rest_E[e] >= 0 ? INFINITY : fullest;
    }
    return fullest;
}

/* Whether no split over the current layout reaches this PAR. Usually the sole replicas prove it. */
static bool
is_out_of_reach(Fill *fill, double par)
{
    Flow *held = fill->flow;
    for (int32_t s = 0; s < held->servers; s++) {
        double alone = 0;
        for (int32_t n = held->first_S[s]; n < held->first_S[s + 1]; n++) {
            int32_t e = held->expert_N[n];
            alone += e != NONE && held->next_N[held->head_E[e]] == NONE ? fill->layer->load_E[e] : 0;
        }
        if (alone > par * capacity_of(fill, s) * (1 + SLACK)) {
            return true;
        }
    }
    /* What is given is near; another server has to take what would be loaded. */
    memset(held->settled_S, 0, (size_t)held->servers);
    memset(held->load_S, 0, (size_t)held->servers * sizeof(double));
    memset(held->flow_N, 0, (size_t)held->slots * sizeof(double));
    for (int32_t s = 0; s < held->servers; s++) {
        for (int32_t i = held->first_S[s]; i < held->first_S[s] + fill->gives_S[s]; i++) {
            int32_t slot = fill->slot_N[i] == NONE ? held->head_E[fill->given_N[i]] : fill->slot_N[i];
            held->flow_N[slot] += fill->give_N[i];
            held->load_S[held->server_N[slot]] += fill->give_N[i];
        }
    }
    return flow_push(held, par * fill->mean, SLACK) > 0;
}

/* Puts what servers are given into their slots. */
static void
put_given(Fill *fill)
{
    Layer *layer = fill->layer;
    Flow *flow = fill->flow;
    int32_t *used_N = fill->may_N;
    memset(used_N, 0, (size_t)flow->slots * sizeof(*used_N));
    memset(flow->flow_N, 0, (size_t)flow->slots * sizeof(double));
    for (int32_t s = 0; s < flow->servers; s++) {
        int32_t first = flow->first_S[s], end = first + fill->gives_S[s], last = flow->first_S[s + 1];
        int32_t empty = first, unused = first;
        for (int32_t i = first; i < end; i++) {
            if (fill->slot_N[i] != NONE) {
                used_N[fill->slot_N[i]] = 1;
                flow->flow_N[fill->slot_N[i]] = fill->give_N[i];
            }
        }
        /* Free slots, then those of unneeded replicas. */
        for (int32_t i = first; i < end; i++) {
            if (fill->slot_N[i] != NONE) {
                continue;
            }
            while (empty < last && flow->expert_N[empty] != NONE) {
                empty++;
            }
            while (empty == last && used_N[unused]) {
                unused++;
            }
            int32_t slot = empty < last ? empty : unused;
            if (empty == last) {
                take_everywhere(layer, slot);
            }
            put_everywhere(layer, slot, fill->given_N[i]);
            flow->flow_N[slot] = fill->give_N[i];
            used_N[slot] = 1;
        }
    }
}

bool
fill(Layer *layer)
{
    Arena arena = {.block = layer->scratch};
    Fill fill = place_arrays(layer, &arena, layer->flow_B[0].slots);
    begin(&fill);
    if (fill.spare < 0) {
        return false;
    }
    fill.anew = true;
    give_all(&fill);
    count_loads(&fill);
    put_given(&fill);
    return true;
}

double
refill(Layer *layer)
{
    Arena arena = {.block = layer->scratch};
    Fill fill = place_arrays(layer, &arena, layer->flow_B[0].slots);
    begin(&fill);
    if (fill.spare < 0 || !(fill.load > 0)) {
        return INFINITY;
    }
    give_all(&fill);
    int64_t loads = count_loads(&fill);
    double par = judge(&fill), worth = par + layer->price * (double)loads;
    if (isinf(par) || (loads > 0 && !is_out_of_reach(&fill, worth))) {
        return worth - 1;
    }
    put_given(&fill);
    return par - 1;
}
