/* Items: what is left of the experts to be dealt out, ascending by load. No Python in here. */
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
    double crumb;
} Items;

/* What one server, or one node, gets: `count` items, and `part` of one more (of none: NONE). */
typedef struct {
    int32_t first, count;
    int32_t split;
    double part;
} Share;

/* Lays out room for so many items, of which the doubles and counts move on: twice as many doubles, and one. */
Items make_items(double **doubles, int32_t **counts, int32_t room, double crumb);

/* Experts of one list (NULL: all) by load, after `empty` empty slots. */
void sort_experts(Items *items, const double *load_E, const int32_t *listed, int32_t experts, int32_t empty);

/* The sums, and of all. */
double add_up(Items *items);

/* The last of the `windows` windows of `size` items whose sum is at most `most`; -1 where there is none. */
int32_t last_window(const Items *items, int32_t windows, int32_t size, double most);

/* Exactly `capacity` of the items (whose sums are up to date): `whole` of them, and a part of one more. */
Share choose(const Items *items, double capacity, int32_t whole);

void remove_items(Items *items, int32_t first, int32_t count);
void insert_item(Items *items, double rest, int32_t expert);

/* Takes a share off the items, into `out` (room for one more than its count); what is left of a split expert stays, as
 * an empty slot where nothing of it is. Returns how many came out. */
int32_t take_share(Items *items, Share share, Items *out);

#endif
