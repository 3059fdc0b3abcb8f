/* Items: the experts' remaining loads to deal out, ascending. */
#ifndef EAAS_FRACTIONAL_ITEMS_H
#define EAAS_FRACTIONAL_ITEMS_H

#include "layer.h"

/* Pieces below this part of the load are rounding. */
#define CRUMB 1e-12

typedef struct {
    double *rest;
    int32_t *expert; /* NONE: an empty slot */
    double *sums;    /* count + 1, of the items before */
    int32_t count;
    int32_t empty; /* the first items that are empty slots: with few slots a server they are most */
    int32_t zeros; /* the first sums that are 0 */
    double crumb;
} Items;

/* Load of one server or node: own items own .. own_end - 1, others first .. first + count - 1, and `part` of one more,
 * `split` (NONE: of none). */
typedef struct {
    int32_t own, own_end;
    int32_t first, count;
    int32_t split;
    bool split_is_own;
    double part;
} Share;

Items make_items(Arena *arena, int32_t room);

/* Experts with a rest of at least 0 by their rest, after `empty` empty slots. */
void sort_experts(Items *items, const double *rest_E, int32_t experts, int32_t empty);

/* Computes the sums; returns the total. */
double add_up(Items *items);

/* How many of the first `windows` windows of `size` items have a sum below a limit. */
int32_t windows_below(const Items *items, int32_t windows, int32_t size, double limit);

/* Exactly `capacity` of the items (whose sums are up to date): `whole` of them, and a part of one more. */
Share choose(const Items *items, double capacity, int32_t whole);

/* The same with as many own items as possible, of those and others. False: it keeps none. */
bool choose_own(const Items *own, const Items *others, double capacity, int32_t whole, Share *share);

void remove_item(Items *items, double rest, int32_t expert);
void insert_item(Items *items, double rest, int32_t expert);

/* Moves a share from both lists to `out`, and own items that are not part of it to the others, as the rest of the split
 * one: an empty slot if it is nothing. Updates the experts' rests (-1: nothing). */
void take_share(const Items *own, Items *others, const Share *share, Items *out, double *rest_E);

#endif
