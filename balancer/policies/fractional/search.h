/* Shared by the parts of improve; see there. */
#ifndef EAAS_FRACTIONAL_SEARCH_H
#define EAAS_FRACTIONAL_SEARCH_H

#include "layer.h"

#define EXACT 1e-9
#define WORTH 1e-3 /* least part of the excess that an exchange must remove */

/* State of a stage. `weight_B`, 1 over a scenario's total, makes loads comparable between scenarios. */
typedef struct {
    Layer *layer;
    double *weight_B, *mean_B, *par_B, *excess_B;
    double *bound_EB;    /* load of experts that no server with capacity holds */
    double *spare_EB;    /* capacity of the servers that hold an expert */
    double *net_N;       /* excess that an exchange in a slot would remove, as of the round's beginning */
    int32_t *heap;       /* slots with a gain, the greatest first */
    int32_t heap_count;
    double *most_B;      /* scratch */
    int32_t *bound_list; /* experts with such a load */
    int32_t bound_count;
    double *saved_BN, *saved_BS;
    int32_t *saved_N;    /* experts */
    int32_t *before_N;   /* initial experts */
    double excess;       /* over all scenarios, weighted */
    int64_t exchanges;   /* in this stage */
    int32_t rounds_left;
    int64_t cross_node;
} Search;

/* search.c: the mean PAR with the best flow of each scenario. */
double measure(Search *search);
/* Number of replicas that differ from the initial layout. */
int64_t count_loads(const Search *search);
void save(Search *search);
void restore(Search *search);
/* Shifts load down to a target between mean and peak if possible, and finds the excess: in total, and by expert. */
void push(Search *search, double aim);
void find_bound(Search *search);

/* spare.c: find_places finds where one more replica helps, at a round's beginning; replicate_one adds one of them in
 * the place of a spare one. False: there is none. */
void find_places(Search *search);
bool replicate_one(Search *search);

/* swap.c: two experts change places. False: no pair does. */
bool swap_one(Search *search);

#endif
