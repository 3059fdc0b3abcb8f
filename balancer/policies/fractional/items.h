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

/* Load of one server or node: `count` items, and `part` of one more (NONE: of none). */
typedef struct {
    int32_t first, count;
    int32_t split;
    double part;
} Share;

Items make_items(Arena *arena, int32_t room, double crumb);

/* Experts of one list (NULL: all) by load, after `empty` empty slots. */
void sort_experts(Items *items, const double *load_E, const int32_t *listed, int32_t experts, int32_t empty);

/* Computes the sums; returns the total. */
double add_up(Items *items);

/* The last of the `windows` windows of `size` items whose sum is at most `most`; -1: none. */
int32_t last_window(const Items *items, int32_t windows, int32_t size, double most);

/* Exactly `capacity` of the items (whose sums are up to date): `whole` of them, and a part of one more. */
Share choose(const Items *items, double capacity, int32_t whole);

int32_t first_at_least(const Items *items, double rest);
void remove_items(Items *items, int32_t first, int32_t count);
void insert_item(Items *items, double rest, int32_t expert);

/* Moves a share from the items to `out` (of count + 1 places). The rest of a split expert stays, as an empty slot if it
 * is nothing. Returns the number of moved items. */
int32_t take_share(Items *items, Share share, Items *out);

#endif
