#include "items.h"

#include <math.h>
#include <string.h>

#define SLACK 1e-9

/* Servers filled anew to exactly their parts of one load, with what they hold already as far as it goes.
 *
 * Any server may be filled by any k - 1 whole experts and a piece of one more: what remains for the others can be dealt
 * out as well (see `choose`), as long as it is no more items than they have slots, less one each, and one.
 *
 *     leaf       an open server that has at most one expert in common with other open ones: what that one has to give
 *                it is certain then; the next server along the chain is a leaf after that
 *     put off    a leaf whose own experts are too much, or too little even with all of that one: these are dealt
 *                out last, as in fill.c, but a server's own experts first
 */
typedef struct {
    Layer *layer;
    Flow *flow;
    double *rest_E;   /* what no server has been given */
    double *give_N;   /* what a server is given, from its first slot on: `given_N` says of which experts */
    int32_t *given_N;
    int32_t *gives_S; /* how many */
    int32_t *open_E;  /* open servers that hold it and have not passed it up */
    int32_t *common_S; /* how many of a server's experts others have, too */
    int32_t *queue_S, *late_S;
    int32_t *live_E;  /* whether a server is still to be given the expert, or the rest of it */
    int32_t *may_N;   /* whether the server may be given the slot's expert */
    int32_t *unused_N; /* whether it had hardly a share */
    int32_t *state_S;
    int32_t queued, late;
    int64_t spare;    /* items that open servers could hold, less those that there are */
    double mean, crumb;
} Refill;

enum { OPEN, QUEUED, LATE, CLOSED };

static int32_t
slots_of(const Refill *refill, int32_t server)
{
    return refill->flow->first_S[server + 1] - refill->flow->first_S[server];
}

static double
capacity_of(const Refill *refill, int32_t server)
{
    return refill->mean * refill->layer->speed_S[server];
}

static void
give(Refill *refill, int32_t server, int32_t expert, double load)
{
    int32_t at = refill->flow->first_S[server] + refill->gives_S[server]++;
    refill->given_N[at] = expert;
    refill->give_N[at] = load;
}

static void
queue_leaf(Refill *refill, int32_t server)
{
    if (refill->state_S[server] == OPEN && refill->common_S[server] <= 1) {
        refill->state_S[server] = QUEUED;
        refill->queue_S[refill->queued++] = server;
    }
}

/* The server will not be given the slot's expert. */
static void
pass_up(Refill *refill, int32_t slot)
{
    const Flow *flow = refill->flow;
    int32_t expert = flow->expert_N[slot], server = flow->server_N[slot];
    refill->may_N[slot] = 0;
    if (refill->open_E[expert]-- >= 2) {
        refill->common_S[server]--;
        queue_leaf(refill, server);
    }
    if (refill->open_E[expert] == 1) {
        int32_t last = flow->head_E[expert];
        while (!refill->may_N[last]) {
            last = flow->next_N[last];
        }
        refill->common_S[flow->server_N[last]]--;
        queue_leaf(refill, flow->server_N[last]);
    }
}

/* All other servers pass the slot's expert up. */
static void
claim(Refill *refill, int32_t slot)
{
    const Flow *flow = refill->flow;
    for (int32_t n = flow->head_E[flow->expert_N[slot]]; n != NONE; n = flow->next_N[n]) {
        if (n != slot && refill->may_N[n]) {
            pass_up(refill, n);
        }
    }
}

/* Gives a leaf its own experts, and what it lacks of the one in common; or puts it off. */
static void
close_leaf(Refill *refill, int32_t server)
{
    const Flow *flow = refill->flow;
    double lacks = capacity_of(refill, server);
    int32_t own = 0, common = NONE;
    for (int32_t n = flow->first_S[server]; n < flow->first_S[server + 1]; n++) {
        int32_t e = flow->expert_N[n];
        if (e == NONE || !refill->may_N[n]) {
            continue;
        }
        if (refill->open_E[e] > 1) {
            common = n;
        } else {
            lacks -= refill->rest_E[e];
            own++;
        }
    }
    double rest = common == NONE ? 0 : refill->rest_E[flow->expert_N[common]];
    bool exact = lacks >= -refill->crumb && lacks <= rest + refill->crumb;
    bool all = common != NONE && lacks >= rest - refill->crumb;
    int64_t spare = refill->spare - (slots_of(refill, server) - 1) + own + (exact && all);
    if (all) {
        claim(refill, common);
    } else if (common != NONE && (!exact || spare < 0)) {
        pass_up(refill, common);
    }
    if (!exact || spare < 0) {
        refill->state_S[server] = LATE;
        refill->late_S[refill->late++] = server;
        return;
    }
    refill->state_S[server] = CLOSED;
    refill->spare = spare;
    for (int32_t n = flow->first_S[server]; n < flow->first_S[server + 1]; n++) {
        int32_t e = flow->expert_N[n];
        if (e == NONE || !refill->may_N[n]) {
            continue;
        }
        bool part = n == common && !all;
        if (part && lacks <= refill->crumb) {
            pass_up(refill, n);
            continue;
        }
        give(refill, server, e, part ? lacks : refill->rest_E[e]);
        refill->rest_E[e] = part ? rest - lacks : 0;
        refill->live_E[e] = part;
        pass_up(refill, n);
    }
}

/* The same for a start of the flow: whatever it has too much or too little. */
static void
load_leaf(Refill *refill, int32_t server)
{
    Flow *flow = refill->flow;
    double capacity = capacity_of(refill, server), load = 0;
    int32_t common = NONE;
    for (int32_t n = flow->first_S[server]; n < flow->first_S[server + 1]; n++) {
        int32_t e = flow->expert_N[n];
        if (e == NONE || !refill->may_N[n]) {
            continue;
        }
        if (refill->open_E[e] > 1) {
            common = n;
        } else {
            load += flow->flow_N[n] = refill->rest_E[e];
        }
        pass_up(refill, n);
    }
    if (common != NONE && load < capacity) {
        double *rest = &refill->rest_E[flow->expert_N[common]];
        flow->flow_N[common] = *rest < capacity - load ? *rest : capacity - load;
        load += flow->flow_N[common];
        *rest -= flow->flow_N[common];
    }
    flow->load_S[server] = load;
    refill->state_S[server] = CLOSED;
}

/* Where no server is a leaf: the one with the most in common passes up what most others have, too. */
static void
loosen(Refill *refill)
{
    const Flow *flow = refill->flow;
    int32_t most = NONE, slot = NONE;
    for (int32_t s = 0; s < flow->servers; s++) {
        if (refill->state_S[s] == OPEN && (most == NONE || refill->common_S[s] > refill->common_S[most])) {
            most = s;
        }
    }
    for (int32_t n = flow->first_S[most]; n < flow->first_S[most + 1]; n++) {
        int32_t e = flow->expert_N[n];
        if (refill->may_N[n] && (slot == NONE || refill->open_E[e] > refill->open_E[flow->expert_N[slot]])) {
            slot = n;
        }
    }
    pass_up(refill, slot);
}

static void
follow_chains(Refill *refill, void (*settle)(Refill *, int32_t))
{
    int32_t servers = refill->flow->servers, without = 0;
    for (int32_t s = 0; s < servers; s++) {
        without += refill->state_S[s] == CLOSED;
        queue_leaf(refill, s);
    }
    for (int32_t next = 0; next < servers - without; next++) {
        while (next == refill->queued) {
            loosen(refill);
        }
        settle(refill, refill->queue_S[next]);
    }
}

/* ---- servers that were put off -------------------------------------------------------------------------------- */

static int32_t
find_item(const Items *items, double rest, int32_t expert)
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
    while (items->expert[low] != expert) {
        low++;
    }
    return low;
}

/* Takes what the server holds out of the items, into `own`, ascending; returns how many. */
static int32_t
take_own(Refill *refill, Items *items, int32_t server, Items *own)
{
    const Flow *flow = refill->flow;
    own->count = 0;
    for (int32_t n = flow->first_S[server]; n < flow->first_S[server + 1]; n++) {
        int32_t e = flow->expert_N[n];
        if (e != NONE && refill->live_E[e]) {
            remove_items(items, find_item(items, refill->rest_E[e], e), 1);
            insert_item(own, refill->rest_E[e], e);
        }
    }
    return own->count;
}

/* The first of the `windows` windows of `size` items whose sum is at least `least`; `windows` where there is none. */
static int32_t
first_window(const Items *items, int32_t windows, int32_t size, double least)
{
    int32_t low = 0, high = windows;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (items->sums[middle + size] - items->sums[middle] < least) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* What a server is given: own experts from..end - 1, others from..., and a piece of one more. */
typedef struct {
    int32_t own, own_end;
    int32_t first, count;
    bool piece_is_own; /* of the last of its own, which is not given whole then */
    double piece;
} Choice;

/* With the own experts own .. own_end - 1 whole but for the last one, which is given in part, or whole and a part of
 * the hottest of the others; and so many others whole that all slots but one are. The smallest others are preferred:
 * empty slots are the smallest. */
static bool
complete(const Items *own, const Items *others, double capacity, int32_t slots, double sum, Choice *choice)
{
    int32_t whole = choice->own_end - choice->own - choice->piece_is_own, hottest = others->count - 1;
    if (choice->piece_is_own ? whole < 0 : hottest < 0 || whole >= slots) {
        return false;
    }
    double most = choice->piece_is_own ? own->rest[choice->own_end - 1] : others->rest[hottest];
    double lacks = capacity - sum + (choice->piece_is_own ? most : 0);
    choice->count = slots - 1 - whole;
    int32_t windows = others->count - choice->count + choice->piece_is_own;
    choice->first = first_window(others, windows, choice->count, lacks - most - others->crumb);
    if (choice->count > others->count || choice->first >= windows) {
        return false;
    }
    choice->piece = lacks - (others->sums[choice->first + choice->count] - others->sums[choice->first]);
    return choice->piece >= -others->crumb;
}

/* Keeps as many of its own as it can: without its largest where they are too much, without its smallest where they are
 * too little. False where it is to keep none. */
static bool
choose_own(const Items *own, const Items *others, double capacity, int32_t slots, Choice *choice)
{
    double sum = 0;
    for (int32_t i = 0; i < own->count; i++) {
        sum += own->rest[i];
    }
    *choice = (Choice){.own_end = own->count};
    while (choice->own < choice->own_end) {
        int32_t last = choice->own_end - 1;
        choice->piece_is_own = true;
        if (complete(own, others, capacity, slots, sum, choice)) {
            return true;
        }
        choice->piece_is_own = false;
        if (complete(own, others, capacity, slots, sum, choice)) {
            return true;
        }
        if (sum - own->rest[last] > capacity || (last - choice->own < slots - 1 && sum > capacity)) {
            sum -= own->rest[last];
            choice->own_end--;
        } else {
            sum -= own->rest[choice->own++];
        }
    }
    return false;
}

static void
take_chosen(Refill *refill, Items *own, Items *others, int32_t server, const Choice *choice)
{
    int32_t split = choice->piece_is_own ? own->expert[choice->own_end - 1] : others->expert[others->count - 1];
    double rest = (choice->piece_is_own ? own->rest[choice->own_end - 1] : others->rest[others->count - 1]) - choice->piece;
    bool gone = rest <= others->crumb;
    if (!choice->piece_is_own) {
        others->count--;
    }
    for (int32_t i = 0; i < own->count; i++) {
        if (i < choice->own || i >= choice->own_end) {
            continue;
        }
        if (own->expert[i] != split) {
            give(refill, server, own->expert[i], own->rest[i]);
            refill->live_E[own->expert[i]] = 0;
        }
    }
    for (int32_t i = choice->first; i < choice->first + choice->count; i++) {
        if (others->expert[i] != NONE) {
            give(refill, server, others->expert[i], others->rest[i]);
            refill->live_E[others->expert[i]] = 0;
        }
    }
    if (choice->piece > others->crumb || gone) {
        give(refill, server, split, choice->piece);
    }
    remove_items(others, choice->first, choice->count);
    for (int32_t i = 0; i < own->count; i++) {
        if (i < choice->own || i >= choice->own_end) {
            insert_item(others, own->rest[i], own->expert[i]);
        }
    }
    insert_item(others, gone ? 0 : rest, gone ? NONE : split);
    refill->live_E[split] = !gone;
    refill->rest_E[split] = rest;
}

/* As in fill.c, whoever holds what. */
static void
take_any(Refill *refill, Items *items, int32_t server, Items *out)
{
    add_up(items);
    Share share = choose(items, capacity_of(refill, server), slots_of(refill, server) - 1);
    int32_t split = share.split == NONE ? NONE : items->expert[share.split];
    double rest = split == NONE ? 0 : items->rest[share.split] - share.part;
    int32_t taken = take_share(items, share, out);
    for (int32_t i = 0; i < taken; i++) {
        if (out->expert[i] != NONE) {
            give(refill, server, out->expert[i], out->rest[i]);
            refill->live_E[out->expert[i]] = 0;
        }
    }
    if (split != NONE) {
        refill->live_E[split] = rest > items->crumb || !(share.part > 0);
        refill->rest_E[split] = rest;
    }
}

static void
deal_out(Refill *refill, Items *items, Items *own, Items *out)
{
    for (int32_t i = 0; i + 1 < refill->late; i++) {
        int32_t server = refill->late_S[i];
        Choice choice;
        take_own(refill, items, server, own);
        add_up(items);
        if (choose_own(own, items, capacity_of(refill, server), slots_of(refill, server), &choice)) {
            take_chosen(refill, own, items, server, &choice);
            continue;
        }
        for (int32_t at = 0; at < own->count; at++) {
            insert_item(items, own->rest[at], own->expert[at]);
        }
        take_any(refill, items, server, out);
    }
    /* All that is left; there are no more than slots where servers are alike. */
    int32_t last = refill->late_S[refill->late - 1];
    for (int32_t at = 0; at < items->count; at++) {
        if (items->expert[at] != NONE && refill->gives_S[last] < slots_of(refill, last)) {
            give(refill, last, items->expert[at], items->rest[at]);
            refill->live_E[items->expert[at]] = 0;
        }
    }
}

/* Those with too much first: what they leave is what the others lack. */
static void
order_late(Refill *refill)
{
    const Flow *flow = refill->flow;
    int32_t front = 0;
    for (int32_t i = 0; i < refill->late; i++) {
        int32_t server = refill->late_S[i];
        double own = 0;
        for (int32_t n = flow->first_S[server]; n < flow->first_S[server + 1]; n++) {
            own += flow->expert_N[n] != NONE && refill->live_E[flow->expert_N[n]] ? refill->rest_E[flow->expert_N[n]] : 0;
        }
        if (own > capacity_of(refill, server)) {
            refill->late_S[i] = refill->late_S[front];
            refill->late_S[front++] = server;
        }
    }
}

/* ---- all ---------------------------------------------------------------------------------------------------------- */

/* False where there are too few slots for it. */
static bool
begin(Refill *refill)
{
    const Layer *layer = refill->layer;
    const Flow *flow = refill->flow;
    double load = 0, speed = 0;
    refill->spare = 1 - layer->experts;
    refill->queued = refill->late = 0;
    for (int32_t e = 0; e < layer->experts; e++) {
        load += refill->rest_E[e] = layer->load_E[e];
        refill->live_E[e] = 1;
        refill->open_E[e] = replicas(flow, e);
    }
    for (int32_t s = 0; s < flow->servers; s++) {
        speed += layer->speed_S[s];
        refill->spare += slots_of(refill, s) - 1;
        refill->gives_S[s] = refill->common_S[s] = 0;
        refill->state_S[s] = slots_of(refill, s) > 0 ? OPEN : CLOSED;
        for (int32_t n = flow->first_S[s]; n < flow->first_S[s + 1]; n++) {
            refill->may_N[n] = flow->expert_N[n] != NONE;
            refill->common_S[s] += refill->may_N[n] && refill->open_E[flow->expert_N[n]] > 1;
        }
    }
    refill->mean = load / speed;
    refill->crumb = load * CRUMB;
    return load > 0 && refill->spare >= 0;
}

/* What the shares so far have no use for is no link of a chain. */
static void
pass_up_unused(Refill *refill)
{
    const Flow *flow = refill->flow;
    for (int32_t n = 0; n < flow->slots; n++) {
        int32_t e = flow->expert_N[n];
        if (e != NONE && refill->open_E[e] > 1 && refill->unused_N[n]) {
            pass_up(refill, n);
        }
    }
}

/* Fullness of the fullest server over the mean, and how many replicas there are that are not held now. */
static double
judge(const Refill *refill, int64_t *loads)
{
    const Flow *flow = refill->flow;
    double fullest = 0;
    *loads = 0;
    for (int32_t s = 0; s < flow->servers; s++) {
        double load = 0;
        for (int32_t i = flow->first_S[s]; i < flow->first_S[s] + refill->gives_S[s]; i++) {
            load += refill->give_N[i];
            *loads += !holds(flow, s, refill->given_N[i]);
        }
        load /= capacity_of(refill, s);
        fullest = load > fullest ? load : fullest;
    }
    for (int32_t e = 0; e < flow->experts; e++) {
        fullest = refill->live_E[e] ? INFINITY : fullest;
    }
    return fullest;
}

/* Whether no split over what is held now has so low a PAR. What only one server has is proof enough, mostly. */
static bool
is_out_of_reach(const Refill *refill, double par)
{
    const Flow *held = refill->flow;
    for (int32_t s = 0; s < held->servers; s++) {
        double alone = 0;
        for (int32_t n = held->first_S[s]; n < held->first_S[s + 1]; n++) {
            int32_t e = held->expert_N[n];
            alone += e != NONE && held->next_N[held->head_E[e]] == NONE ? refill->layer->load_E[e] : 0;
        }
        if (alone > par * capacity_of(refill, s) * (1 + SLACK)) {
            return true;
        }
    }
    return flow_push(refill->flow, par * refill->mean, SLACK) > 0;
}

static void
apply(Refill *refill)
{
    Layer *layer = refill->layer;
    Flow *flow = refill->flow;
    int32_t *used_N = refill->may_N;
    memset(used_N, 0, (size_t)flow->slots * sizeof(*used_N));
    for (int32_t n = 0; n < flow->slots; n++) {
        flow->flow_N[n] = 0;
    }
    for (int32_t s = 0; s < flow->servers; s++) {
        int32_t first = flow->first_S[s], end = flow->first_S[s + 1], next = first;
        for (int32_t i = first; i < first + refill->gives_S[s]; i++) {
            for (int32_t n = first; n < end; n++) {
                if (flow->expert_N[n] == refill->given_N[i]) {
                    used_N[n] = 1;
                    flow->flow_N[n] = refill->give_N[i];
                    refill->given_N[i] = NONE;
                    break;
                }
            }
        }
        /* Free slots, then those of replicas that are not needed. */
        for (int32_t i = first; i < first + refill->gives_S[s]; i++) {
            if (refill->given_N[i] == NONE) {
                continue;
            }
            int32_t slot = free_slot(flow, s);
            if (slot == NONE) {
                while (used_N[next]) {
                    next++;
                }
                slot = next;
                take_everywhere(layer, slot);
            }
            put_everywhere(layer, slot, refill->given_N[i]);
            flow->flow_N[slot] = refill->give_N[i];
            used_N[slot] = 1;
        }
    }
}

size_t
refill_doubles(int32_t experts, int32_t slots)
{
    return (size_t)experts + (size_t)slots + 3 * (2 * ((size_t)slots + (size_t)experts + 2) + 1);
}

size_t
refill_counts(int32_t servers, int32_t experts, int32_t slots)
{
    return 5 * (size_t)servers + 2 * (size_t)experts + 3 * (size_t)slots + 3 * ((size_t)slots + (size_t)experts + 2);
}

double
refill(Layer *layer)
{
    Flow *flow = &layer->flow_B[0];
    int32_t servers = layer->servers, experts = layer->experts, slots = flow->slots, room = slots + experts + 2;
    double *doubles = layer->scratch;
    int32_t *counts = layer->counts;
    Refill refill = {.layer = layer, .flow = flow};
    refill.rest_E = doubles;
    refill.give_N = refill.rest_E + experts;
    doubles = refill.give_N + slots;
    refill.gives_S = counts;
    refill.common_S = refill.gives_S + servers;
    refill.queue_S = refill.common_S + servers;
    refill.late_S = refill.queue_S + servers;
    refill.state_S = refill.late_S + servers;
    refill.open_E = refill.state_S + servers;
    refill.live_E = refill.open_E + experts;
    refill.given_N = refill.live_E + experts;
    refill.may_N = refill.given_N + slots;
    refill.unused_N = refill.may_N + slots;
    counts = refill.unused_N + slots;
    if (!begin(&refill)) {
        return INFINITY;
    }
    for (int32_t n = 0; n < slots; n++) {
        refill.unused_N[n] = flow->flow_N[n] <= 2 * LEAST_SHARE;
        flow->flow_N[n] = 0;
    }
    pass_up_unused(&refill);
    follow_chains(&refill, load_leaf);
    memset(flow->settled_S, 0, (size_t)servers);
    double now = 0;
    for (int32_t s = 0; s < servers; s++) {
        now = fmax(now, flow->load_S[s] / capacity_of(&refill, s));
    }
    if (now - 1 <= layer->price) {
        return now - 1;
    }
    begin(&refill);
    pass_up_unused(&refill);
    Items items = make_items(&doubles, &counts, room, refill.crumb);
    Items out = make_items(&doubles, &counts, room, refill.crumb);
    Items own = make_items(&doubles, &counts, room, refill.crumb);
    follow_chains(&refill, close_leaf);
    if (refill.late > 0) {
        int32_t *listed = out.expert, live = 0;
        for (int32_t e = 0; e < experts; e++) {
            if (refill.live_E[e]) {
                listed[live++] = e;
            }
        }
        sort_experts(&items, refill.rest_E, listed, live, (int32_t)refill.spare);
        order_late(&refill);
        deal_out(&refill, &items, &own, &out);
    }
    int64_t loads;
    double par = judge(&refill, &loads), worth = par + layer->price * (double)loads;
    if (isinf(par) || !is_out_of_reach(&refill, worth)) {
        return worth - 1;
    }
    apply(&refill);
    return par - 1;
}
