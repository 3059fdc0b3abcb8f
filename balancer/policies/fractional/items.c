#include "items.h"

#include <string.h>

#include "../native/keys.h"

/* If free to choose, a server gets this part of its capacity as whole experts and the rest as a piece of the hottest
 * remaining expert. A split can shift the pieces later. */
#define WHOLE_PART 0.6

Items
make_items(Arena *arena, int32_t room)
{
    Items items = {0};
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
sort_experts(Items *items, const double *rest_E, int32_t experts, int32_t empty)
{
    uint64_t *keys = (uint64_t *)items->sums;
    int32_t count = 0;
    for (int32_t e = 0; e < experts; e++) {
        if (rest_E[e] >= 0) {
            keys[count++] = key_of(rest_E[e], e);
        }
    }
    sort_keys(keys, (uint64_t *)items->rest, count);
    for (int32_t i = 0; i < empty; i++) {
        items->rest[i] = 0;
        items->expert[i] = NONE;
    }
    for (int32_t i = 0; i < count; i++) {
        /* Keys ignore small differences, which searches in the items do not. */
        int32_t expert = item_of(keys[i]), at = empty + i;
        for (; at > empty && items->rest[at - 1] > rest_E[expert]; at--) {
            items->rest[at] = items->rest[at - 1];
            items->expert[at] = items->expert[at - 1];
        }
        items->rest[at] = rest_E[expert];
        items->expert[at] = expert;
    }
    items->count = empty + count;
    items->empty = empty;
    items->zeros = 0;
}

int32_t
windows_below(const Items *items, int32_t windows, int32_t size, double limit)
{
    int32_t low = 0, high = windows;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (items->sums[middle + size] - items->sums[middle] < limit) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Exactly `capacity` of the items: `whole` of them, and a part of one more. Always possible if all bins are alike and
 * there are as many items as `whole` adds up to over the remaining bins, or one more: then the smallest items are not
 * too much, the largest are enough, and in between the sum of a window grows by less than the next item. The rest is
 * the same problem with one bin less. */
Share
choose(const Items *items, double capacity, int32_t whole)
{
    int32_t count = items->count, hottest = count - 1;
    double most = capacity + items->crumb;
    if (count <= whole) {
        return (Share){.count = count, .split = NONE};
    }
    double limit = items->rest[hottest] < capacity * (1 - WHOLE_PART) ? most : capacity * WHOLE_PART + items->crumb;
    int32_t first = windows_below(items, count - whole, whole, limit) - 1;
    if (first >= 0 && first + whole <= hottest) {
        double sum = items->sums[first + whole] - items->sums[first];
        if (sum + items->rest[hottest] >= capacity - items->crumb) {
            return (Share){.first = first, .count = whole, .split = hottest, .part = capacity - sum};
        }
    }
    first = windows_below(items, count - whole + 1, whole, most) - 1;
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
    return (Share){.first = first, .count = whole, .split = split, .part = part > 0 ? part : 0};
}

/* Adds so many others to a share's own items that `whole` are whole, and a part of its split one, with a load of
 * `lacks` together. The smallest others are preferred: empty slots are the smallest. */
static bool
complete(const Items *own, const Items *others, Share *share, double lacks, int32_t whole)
{
    double most = share->split_is_own ? own->rest[share->split] : others->rest[share->split];
    share->count = whole - (share->own_end - share->own);
    int32_t windows = others->count + share->split_is_own - share->count;
    if (share->count < 0 || windows < 1) {
        return false;
    }
    share->first = windows_below(others, windows, share->count, lacks - most - others->crumb);
    if (share->first == windows) {
        return false;
    }
    share->part = lacks - (others->sums[share->first + share->count] - others->sums[share->first]);
    return share->part >= -others->crumb;
}

/* Without the largest if they are too much, without the smallest if they are too little. The split one is the largest
 * of them, or the largest of the others. */
bool
choose_own(const Items *own, const Items *others, double capacity, int32_t whole, Share *share)
{
    double sum = 0;
    for (int32_t i = 0; i < own->count; i++) {
        sum += own->rest[i];
    }
    for (int32_t first = 0, end = own->count; first < end;) {
        double largest = own->rest[end - 1];
        *share = (Share){.own = first, .own_end = end - 1, .split = end - 1, .split_is_own = true};
        if (complete(own, others, share, capacity - sum + largest, whole)) {
            return true;
        }
        *share = (Share){.own = first, .own_end = end, .split = others->count - 1};
        if (others->count > 0 && complete(own, others, share, capacity - sum, whole)) {
            return true;
        }
        if (sum - largest > capacity || (end - 1 - first < whole && sum > capacity)) {
            sum -= largest;
            end--;
        } else {
            sum -= own->rest[first++];
        }
    }
    return false;
}

static void
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

static int32_t
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
remove_item(Items *items, double rest, int32_t expert)
{
    int32_t at = first_at_least(items, rest);
    while (items->expert[at] != expert) {
        at++;
    }
    remove_items(items, at, 1);
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

static void
copy_items(const Items *from, int32_t first, int32_t end, Items *to)
{
    for (int32_t i = first; i < end; i++) {
        to->rest[to->count] = from->rest[i];
        to->expert[to->count++] = from->expert[i];
    }
}

void
take_share(const Items *own, Items *others, const Share *share, Items *out, double *rest_E)
{
    const Items *source = share->split_is_own ? own : others;
    int32_t split = share->split;
    int32_t expert = split == NONE ? NONE : source->expert[split];
    double rest = split == NONE ? 0 : source->rest[split] - share->part;
    out->count = 0;
    copy_items(own, share->own, share->own_end, out);
    copy_items(others, share->first, share->first + share->count, out);
    for (int32_t i = 0; i < out->count; i++) {
        if (out->expert[i] != NONE) {
            rest_E[out->expert[i]] = -1;
        }
    }
    int32_t first = share->first;
    if (split != NONE && !share->split_is_own) {
        remove_items(others, split, 1);
        first -= split < first;
    }
    remove_items(others, first, share->count);
    for (int32_t i = 0; i < own->count; i++) {
        if ((i < share->own || i >= share->own_end) && !(share->split_is_own && i == split)) {
            insert_item(others, own->rest[i], own->expert[i]);
        }
    }
    if (split == NONE) {
        return;
    }
    bool gone = rest <= others->crumb;
    if (share->part > others->crumb || gone) {
        out->rest[out->count] = share->part + (gone ? rest : 0);
        out->expert[out->count++] = expert;
    }
    insert_item(others, gone ? 0 : rest, gone ? NONE : expert);
    if (expert != NONE) {
        rest_E[expert] = gone ? -1 : rest;
    }
}
