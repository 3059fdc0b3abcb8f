#include "items.h"

#include <string.h>

#include "../native/keys.h"

/* If free to choose, a server gets this part of its capacity as whole experts and the rest as a piece of the hottest
 * remaining expert. A split can shift the pieces later. */
#define WHOLE_PART 0.6

Items
make_items(Arena *arena, int32_t room, double crumb)
{
    Items items = {.crumb = crumb};
    items.rest = carve(arena, (size_t)room, sizeof(double));
    items.sums = carve(arena, (size_t)room + 1, sizeof(double));
    items.expert = carve(arena, (size_t)room, sizeof(int32_t));
    return items;
}

double
add_up(Items *items)
{
    double sum = 0, *after = items->sums + 1;
    const double *rest = items->rest;
    int32_t i = items->empty & ~3;
    for (; items->zeros <= i; items->zeros++) {
        items->sums[items->zeros] = 0;
    }
    items->zeros = i + 1;
    /* Four at a time: each addition waits for the one before, which takes most of the time here. */
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
    return sum;
}

void
sort_experts(Items *items, const double *load_E, const int32_t *listed, int32_t experts, int32_t empty)
{
    uint64_t *keys = (uint64_t *)items->sums;
    for (int32_t i = 0; i < experts; i++) {
        int32_t e = listed == NULL ? i : listed[i];
        keys[i] = key_of(load_E[e], e);
    }
    sort_keys(keys, (uint64_t *)items->rest, experts);
    for (int32_t i = 0; i < empty; i++) {
        items->rest[i] = 0;
        items->expert[i] = NONE;
    }
    for (int32_t e = 0; e < experts; e++) {
        /* Keys ignore small differences, which searches in the items do not. */
        int32_t expert = item_of(keys[e]), at = empty + e;
        for (; at > empty && items->rest[at - 1] > load_E[expert]; at--) {
            items->rest[at] = items->rest[at - 1];
            items->expert[at] = items->expert[at - 1];
        }
        items->rest[at] = load_E[expert];
        items->expert[at] = expert;
    }
    items->count = empty + experts;
    items->empty = empty;
    items->zeros = 0;
}

int32_t
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

/* Exactly `capacity` of the items: `whole` of them, and a part of one more. Always possible if all bins are alike and
 * there are as many items as `whole` adds up to over the remaining bins: then the smallest items are not too much, the
 * largest are enough, and in between the sum of a window grows by less than the next item. The rest is the same
 * problem with one bin less. */
Share
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
        /* Even the smallest are too much: take fewer. */
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

void
remove_items(Items *items, int32_t first, int32_t count)
{
    if (first < items->empty) {
        /* Empty slots are alike: those before the other items go. */
        int32_t gone = first + count < items->empty ? count : items->empty - first;
        items->empty -= gone;
        first = items->empty;
    }
    size_t after = (size_t)(items->count - first - count);
    memmove(items->rest + first, items->rest + first + count, after * sizeof(double));
    memmove(items->expert + first, items->expert + first + count, after * sizeof(int32_t));
    items->count -= count;
}

int32_t
first_at_least(const Items *items, double rest)
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
    return low;
}

void
insert_item(Items *items, double rest, int32_t expert)
{
    bool is_empty = expert == NONE && rest == 0;
    int32_t at = is_empty ? items->empty : first_at_least(items, rest);
    items->empty = is_empty ? items->empty + 1 : at < items->empty ? at : items->empty;
    size_t after = (size_t)(items->count - at);
    memmove(items->rest + at + 1, items->rest + at, after * sizeof(double));
    memmove(items->expert + at + 1, items->expert + at, after * sizeof(int32_t));
    items->rest[at] = rest;
    items->expert[at] = expert;
    items->count++;
}

int32_t
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
    /* The later one first, so that the earlier one's index stays valid. */
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
