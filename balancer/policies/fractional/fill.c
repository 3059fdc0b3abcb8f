#include "layer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Where it is free to choose, a server gets this part of its capacity as whole experts and the rest as a piece of the
 * hottest expert that is left. The pieces are what a split can shift later. */
#define WHOLE_PART 0.6
/* Pieces below this part of the load are rounding. */
#define CRUMB 1e-12

/* ---- items: what is left of the experts, ascending by load ------------------------------------------------- */

typedef struct {
    double *rest;
    int32_t *expert; /* NONE: an empty slot */
    double *sums;    /* count + 1, of the items before */
    int32_t count;
    double crumb;
} Items;

/* What one server, or one node, gets: `count` items, and `part` of one more (of none: NONE). */
typedef struct {
    int32_t first, count;
    int32_t split;
    double part;
} Share;

static double
add_up(Items *items)
{
    double sum = 0, *after = items->sums + 1;
    const double *rest = items->rest;
    int32_t i = 0;
    /* Four at a time: an addition takes longer than anything else here, and waits for the one before. */
    for (; i + 4 <= items->count; i += 4) {
        double two = rest[i] + rest[i + 1], three = two + rest[i + 2], four = two + (rest[i + 2] + rest[i + 3]);
        after[i] = sum + rest[i];
        after[i + 1] = sum + two;
        after[i + 2] = sum + three;
        after[i + 3] = sum += four;
    }
    for (; i < items->count; i++) {
        after[i] = sum += rest[i];
    }
    items->sums[0] = 0;
    return sum;
}

typedef struct {
    double load;
    int64_t expert;
} Entry;

static int
compare_loads(const void *left, const void *right)
{
    const Entry *a = left, *b = right;
    int by_load = (a->load > b->load) - (a->load < b->load);
    return by_load != 0 ? by_load : (a->expert > b->expert) - (a->expert < b->expert);
}

/* All experts by load, after `empty` empty slots. */
static void
sort_experts(Items *items, const double *load_E, int32_t experts, int32_t empty)
{
    Entry *entry_E = (Entry *)items->sums; /* Twice as many doubles, and more. */
    for (int32_t e = 0; e < experts; e++) {
        entry_E[e] = (Entry){load_E[e], e};
    }
    qsort(entry_E, (size_t)experts, sizeof(Entry), compare_loads);
    for (int32_t i = 0; i < empty; i++) {
        items->rest[i] = 0;
        items->expert[i] = NONE;
    }
    for (int32_t e = 0; e < experts; e++) {
        items->rest[empty + e] = entry_E[e].load;
        items->expert[empty + e] = (int32_t)entry_E[e].expert;
    }
    items->count = empty + experts;
}

/* The last of the `windows` windows of `size` items whose sum is at most `most`; -1 where there is none. */
static int32_t
last_window(const Items *items, int32_t windows, int32_t size, double most)
{
    int32_t low = 0, high = windows;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (items->sums[middle + size] - items->sums[middle] <= most) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low - 1;
}

/* Exactly `capacity` of the items: `whole` of them, and a part of one more. This is always possible where all bins are
 * alike and there are as many items as `whole` adds up to over the bins left: the smallest items are not too much
 * then, the largest are enough, and between them the sum of a window grows by less than the item that comes next. What
 * is left is a problem of the same kind, with one bin less. */
static Share
choose(const Items *items, double capacity, int32_t whole)
{
    int32_t count = items->count, hottest = count - 1;
    double most = capacity + items->crumb;
    if (count <= whole) {
        return (Share){0, count, NONE, 0};
    }
    int32_t first = last_window(items, count - whole, whole, items->rest[hottest] < capacity * (1 - WHOLE_PART)
                                                                 ? most
                                                                 : capacity * WHOLE_PART + items->crumb);
    if (first >= 0 && first + whole <= hottest) {
        double sum = items->sums[first + whole] - items->sums[first];
        if (sum + items->rest[hottest] >= capacity - items->crumb) {
            return (Share){first, whole, hottest, capacity - sum};
        }
    }
    first = last_window(items, count - whole + 1, whole, most);
    if (first < 0) {
        /* Even the smallest are too much: fewer of them. */
        while (whole > 0 && items->sums[whole] > most) {
            whole--;
        }
        first = 0;
    }
    int32_t split = first + whole < count ? first + whole : first - 1;
    double part = capacity - (items->sums[first + whole] - items->sums[first]);
    part = part < items->rest[split] ? part : items->rest[split];
    return (Share){first, whole, split, part > 0 ? part : 0};
}

static void
remove_items(Items *items, int32_t first, int32_t count)
{
    size_t after = (size_t)(items->count - first - count);
    memmove(items->rest + first, items->rest + first + count, after * sizeof(double));
    memmove(items->expert + first, items->expert + first + count, after * sizeof(int32_t));
    items->count -= count;
}

static void
insert_item(Items *items, double rest, int32_t expert)
{
    int32_t low = 0, high = items->count;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (items->rest[middle] < rest) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    size_t after = (size_t)(items->count - low);
    memmove(items->rest + low + 1, items->rest + low, after * sizeof(double));
    memmove(items->expert + low + 1, items->expert + low, after * sizeof(int32_t));
    items->rest[low] = rest;
    items->expert[low] = expert;
    items->count++;
}

/* Takes a share off the items, into `out` (room for one more than its count); what is left of a split expert stays, as
 * an empty slot where nothing of it is. Returns how many came out. */
static int32_t
take_share(Items *items, Share share, Items *out)
{
    int32_t taken = 0;
    for (int32_t i = share.first; i < share.first + share.count; i++, taken++) {
        out->rest[taken] = items->rest[i];
        out->expert[taken] = items->expert[i];
    }
    if (share.split == NONE) {
        remove_items(items, share.first, share.count);
        return taken;
    }
    int32_t expert = items->expert[share.split];
    double rest = items->rest[share.split] - share.part;
    /* The later one first: the earlier one's index stays. */
    if (share.split > share.first) {
        remove_items(items, share.split, 1);
        remove_items(items, share.first, share.count);
    } else {
        remove_items(items, share.first, share.count);
        remove_items(items, share.split, 1);
    }
    bool gone = rest <= items->crumb && share.part > 0;
    if (share.part > items->crumb || gone) {
        out->rest[taken] = share.part + (gone ? rest : 0);
        out->expert[taken++] = expert;
    }
    insert_item(items, gone ? 0 : rest, gone ? NONE : expert);
    return taken;
}

/* ---- servers ------------------------------------------------------------------------------------------------ */

static int32_t
slots_of(const Layer *layer, int32_t server)
{
    return layer->first_S[server + 1] - layer->first_S[server];
}

/* The server whose slots fit the items that are left best: for the others there are then enough small and enough large
 * ones. As many items as its slots, or one less, should have its share of the load. */
static int32_t
next_server(const Layer *layer, const Items *items, int32_t *open_S, int32_t open, double load, double speed)
{
    int32_t best = 0;
    double best_off = INFINITY;
    for (int32_t i = 0; i < open; i++) {
        int32_t slots = slots_of(layer, open_S[i]);
        double fair = load > 0 ? layer->speed_S[open_S[i]] / speed * items->count : slots - 0.5;
        double off = fair > slots ? fair - slots : fair < slots - 1 ? slots - 1 - fair : 0;
        if (off < best_off) {
            best_off = off;
            best = i;
        }
        if (off == 0) {
            break;
        }
    }
    int32_t server = open_S[best];
    memmove(open_S + best, open_S + best + 1, (size_t)(open - best - 1) * sizeof(int32_t));
    return server;
}

static void
put_items(Layer *layer, int32_t server, const Items *given, int32_t count)
{
    Flow *flow = &layer->flow_B[0];
    int32_t slot = layer->first_S[server];
    for (int32_t i = 0; i < count; i++) {
        if (given->expert[i] != NONE) {
            put_everywhere(layer, slot, given->expert[i]);
            flow->flow_N[slot++] = given->rest[i];
        }
    }
}

/* Deals the items to servers; those for which there is no slot remain. */
static void
fill_servers(Layer *layer, Items *items, int32_t *open_S, int32_t open, Items *out)
{
    double speed = 0;
    for (int32_t i = 0; i < open; i++) {
        speed += layer->speed_S[open_S[i]];
    }
    for (; open > 0; open--) {
        double load = add_up(items);
        int32_t server = next_server(layer, items, open_S, open, load, speed), slots = slots_of(layer, server);
        Share share = {0, 0, NONE, 0};
        if (open == 1) {
            /* All that is left; the largest, where that is too much. */
            share.count = items->count < slots ? items->count : slots;
            share.first = items->count - share.count;
        } else if (slots > 0) {
            share = choose(items, load * layer->speed_S[server] / speed, slots - 1);
        }
        put_items(layer, server, out, take_share(items, share, out));
        speed -= layer->speed_S[server];
    }
}

/* ---- few spare slots: longest processing time first --------------------------------------------------------- */

static bool
may_hold(const Layer *layer, int32_t server, int32_t expert, int64_t abroad)
{
    return !holds(&layer->flow_B[0], server, expert) &&
           (abroad < layer->most_abroad || is_near(layer, server, expert));
}

/* The server with a free slot that would be the least full with it. */
static int32_t
least_full(const Layer *layer, int32_t expert, double load, int64_t abroad, const double *filled_S)
{
    int32_t best = NONE;
    double best_full = INFINITY;
    for (int32_t s = 0; s < layer->servers; s++) {
        double full = (filled_S[s] + load) / layer->speed_S[s];
        if (full < best_full && free_slot(&layer->flow_B[0], s) != NONE && may_hold(layer, s, expert, abroad)) {
            best_full = full;
            best = s;
        }
    }
    return best;
}

/* One more replica to whom it helps the most (Adams' apportionment), until `extra` are given away. */
static void
apportion(const double *load_E, int32_t experts, int32_t servers, int32_t extra, int32_t *count_E)
{
    for (int32_t e = 0; e < experts; e++) {
        count_E[e] = 1;
    }
    for (; extra > 0; extra--) {
        int32_t best = NONE;
        for (int32_t e = 0; e < experts; e++) {
            if (count_E[e] < servers &&
                (best == NONE || load_E[e] * count_E[best] > load_E[best] * count_E[e])) {
                best = e;
            }
        }
        if (best == NONE) {
            break;
        }
        count_E[best]++;
    }
}

static void
pack(Layer *layer, Items *items, int32_t *count_E, double *filled_S)
{
    Flow *flow = &layer->flow_B[0];
    apportion(layer->load_E, layer->experts, layer->servers, flow->slots - layer->experts, count_E);
    items->count = 0;
    for (int32_t e = 0; e < layer->experts; e++) {
        insert_item(items, layer->load_E[e] / count_E[e], e);
    }
    memset(filled_S, 0, (size_t)layer->servers * sizeof(double));
    int64_t abroad = 0;
    for (int32_t i = items->count - 1; i >= 0; i--) {
        int32_t e = items->expert[i];
        for (int32_t r = 0; r < count_E[e]; r++) {
            int32_t server = least_full(layer, e, items->rest[i], abroad, filled_S);
            if (server == NONE) {
                break;
            }
            int64_t before = count_abroad(layer, e);
            int32_t slot = free_slot(flow, server);
            put_everywhere(layer, slot, e);
            flow->flow_N[slot] = items->rest[i];
            filled_S[server] += items->rest[i];
            abroad += count_abroad(layer, e) - before;
        }
    }
}

/* ---- spare slots -------------------------------------------------------------------------------------------- */

/* Replicas of the hottest experts into slots that are still free: not needed for this load, but for the next one. */
static void
use_free_slots(Layer *layer, int32_t *count_E, double *filled_S)
{
    Flow *flow = &layer->flow_B[0];
    int64_t abroad = 0;
    int32_t left = 0;
    for (int32_t n = 0; n < flow->slots; n++) {
        left += flow->expert_N[n] == NONE;
    }
    for (int32_t s = 0; s < layer->servers; s++) {
        filled_S[s] = flow->slots;
        for (int32_t n = layer->first_S[s]; n < layer->first_S[s + 1]; n++) {
            filled_S[s] -= flow->expert_N[n] == NONE;
        }
    }
    for (int32_t e = 0; e < layer->experts; e++) {
        count_E[e] = replicas(flow, e);
        abroad += count_abroad(layer, e);
    }
    while (left > 0) {
        int32_t best = NONE;
        for (int32_t e = 0; e < layer->experts; e++) {
            if (count_E[e] > 0 &&
                (best == NONE || layer->load_E[e] * count_E[best] > layer->load_E[best] * count_E[e])) {
                best = e;
            }
        }
        if (best == NONE) {
            break;
        }
        int32_t server = least_full(layer, best, 0, abroad, filled_S);
        if (server == NONE) {
            count_E[best] = 0;
            continue;
        }
        int64_t before = count_abroad(layer, best);
        put_everywhere(layer, free_slot(flow, server), best);
        filled_S[server]++;
        abroad += count_abroad(layer, best) - before;
        count_E[best]++;
        left--;
    }
}

/* ---- nodes -------------------------------------------------------------------------------------------------- */

/* Deals the items to nodes as if they were servers: at most one expert per node goes on to the next, and none where
 * that is above the limit; then each node's items to its servers. */
static void
fill_nodes(Layer *layer, Items *items, Items *own, Items *out, int32_t *open_S)
{
    double speed = 0;
    int64_t abroad = 0;
    for (int32_t s = 0; s < layer->servers; s++) {
        speed += layer->speed_S[s];
    }
    for (int32_t node = 0; node < layer->nodes; node++) {
        int32_t open = 0, whole = 0;
        double node_speed = 0;
        for (int32_t s = 0; s < layer->servers; s++) {
            if (layer->node_S[s] == node) {
                open_S[open++] = s;
                whole += slots_of(layer, s) > 0 ? slots_of(layer, s) - 1 : 0;
                node_speed += layer->speed_S[s];
            }
        }
        if (open == 0) {
            continue;
        }
        Share share = {0, items->count, NONE, 0};
        double load = add_up(items);
        if (speed > node_speed) {
            double capacity = load * node_speed / speed;
            if (abroad < layer->most_abroad) {
                share = choose(items, capacity, whole);
                abroad++;
            } else if (items->count > whole) {
                int32_t first = last_window(items, items->count - whole + 1, whole, capacity + items->crumb);
                share = (Share){first < 0 ? 0 : first, whole, NONE, 0};
            }
        }
        int32_t taken = take_share(items, share, out);
        own->count = 0;
        for (int32_t i = 0; i < taken; i++) {
            insert_item(own, out->rest[i], out->expert[i]);
        }
        fill_servers(layer, own, open_S, open, out);
        /* What has no slot there goes on; so may already another part of the same expert. */
        for (int32_t i = 0; i < own->count; i++) {
            double rest = own->rest[i];
            for (int32_t j = 0; own->expert[i] != NONE && j < items->count; j++) {
                if (items->expert[j] == own->expert[i]) {
                    rest += items->rest[j];
                    remove_items(items, j, 1);
                    break;
                }
            }
            insert_item(items, rest, own->expert[i]);
        }
        speed -= node_speed;
    }
}

/* ---- all ---------------------------------------------------------------------------------------------------- */

static Items
make_items(double **doubles, int32_t **counts, int32_t room, double crumb)
{
    Items items = {.rest = *doubles, .sums = *doubles + room, .expert = *counts, .crumb = crumb};
    *doubles += 2 * room + 1;
    *counts += room;
    return items;
}

size_t
scratch_doubles(int32_t scenarios, int32_t servers, int32_t experts, int32_t slots)
{
    size_t fill = 3 * (2 * ((size_t)slots + (size_t)experts + 2) + 1) + (size_t)servers;
    size_t improve = (size_t)scenarios * ((size_t)experts + (size_t)slots + (size_t)servers + 5) + (size_t)slots;
    return fill > improve ? fill : improve;
}

size_t
scratch_counts(int32_t servers, int32_t experts, int32_t slots)
{
    return 3 * ((size_t)slots + (size_t)experts + 2) + 2 * (size_t)servers + (size_t)experts;
}

void
fill(Layer *layer)
{
    Flow *flow = &layer->flow_B[0];
    double *doubles = layer->scratch, load = 0;
    int32_t *counts = layer->counts, room = flow->slots + layer->experts + 2, whole = 0;
    for (int32_t e = 0; e < layer->experts; e++) {
        load += layer->load_E[e];
    }
    for (int32_t s = 0; s < layer->servers; s++) {
        whole += slots_of(layer, s) > 0 ? slots_of(layer, s) - 1 : 0;
    }
    Items items = make_items(&doubles, &counts, room, load * CRUMB);
    Items own = make_items(&doubles, &counts, room, load * CRUMB);
    Items out = make_items(&doubles, &counts, room, load * CRUMB);
    int32_t *open_S = counts, *count_E = counts + layer->servers;
    double *filled_S = doubles;
    if (whole < layer->experts) {
        pack(layer, &items, count_E, filled_S);
    } else {
        sort_experts(&items, layer->load_E, layer->experts, whole - layer->experts);
        if (layer->node_S != NULL) {
            fill_nodes(layer, &items, &own, &out, open_S);
        } else {
            for (int32_t s = 0; s < layer->servers; s++) {
                open_S[s] = s;
            }
            fill_servers(layer, &items, open_S, layer->servers, &out);
        }
        cover(layer);
    }
    use_free_slots(layer, count_E, filled_S);
}
