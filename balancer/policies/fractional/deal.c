/* Fills servers that no chain fills: their own experts first, then any. */
#include "refill.h"

#include <string.h>

static int32_t
find_item(const Items *items, double rest, int32_t expert)
{
    int32_t at = first_at_least(items, rest);
    while (items->expert[at] != expert) {
        at++;
    }
    return at;
}

/* Moves the server's experts from the items to `own`, ascending; returns their number. */
static int32_t
take_own(Refill *refill, Items *items, int32_t server, Items *own)
{
    const Flow *flow = refill->flow;
    own->count = own->empty = 0;
    for (int32_t n = flow->first_S[server]; n < flow->first_S[server + 1]; n++) {
        int32_t e = flow->expert_N[n];
        if (e != NONE && refill->live_E[e]) {
            remove_items(items, find_item(items, refill->rest_E[e], e), 1);
            insert_item(own, refill->rest_E[e], e);
        }
    }
    return own->count;
}

/* The first of the `windows` windows of `size` items whose sum is at least `least`; `windows`: none. */
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

/* Load of a server: own experts from..end - 1, others from..., and a piece of one more. */
typedef struct {
    int32_t own, own_end;
    int32_t first, count;
    bool piece_is_own; /* part of its last own expert, if that is split */
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

/* Keeps as many own experts as possible: without the largest if they are too much, without the smallest if they are
 * too little. False: it keeps none. */
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

/* As in fill.c, ignoring current holders. */
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

/* Servers with too much first: the others get what they leave. */
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

void
deal_out(Refill *refill)
{
    Items *items = &refill->items, *own = &refill->own, *out = &refill->out;
    order_late(refill);
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
    /* Everything left; no more than slots if servers are alike. */
    int32_t last = refill->late_S[refill->late - 1];
    for (int32_t at = 0; at < items->count; at++) {
        if (items->expert[at] != NONE && refill->gives_S[last] < slots_of(refill, last)) {
            give(refill, last, items->expert[at], items->rest[at]);
            refill->live_E[items->expert[at]] = 0;
        }
    }
}
