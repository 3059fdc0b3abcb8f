/* What the parts of improve share; see there. No Python in here. */
#ifndef EAAS_FRACTIONAL_SEARCH_H
#define EAAS_FRACTIONAL_SEARCH_H

#include "layer.h"

#define EXACT 1e-9
#define WORTH 1e-3 /* of the excess, the least that an exchange is made for */

/* The state of a stage; with it the loads are comparable between scenarios: `weight_B` is 1 over a scenario's total. */
typedef struct {
    Layer *layer;
    double *weight_B, *mean_B, *par_B, *excess_B;
    double *bound_EB;    /* load of experts that no server with room holds */
    double *net_N;       /* what an exchange in a slot would take off the excess, by the round's beginning */
    int32_t *heap;       /* slots with a gain, the greatest first */
    int32_t heap_count;
    double *most_B;      /* scratch */
    int32_t *bound_list; /* experts with such a load */
    int32_t bound_count;
    double *saved_BN, *saved_BS;
    int32_t *saved_N;    /* experts */
    int32_t *before_N;   /* experts before all */
    double excess;       /* over all scenarios, weighted */
    int64_t exchanges;   /* in this stage */
    int32_t rounds_left;
    int64_t abroad;
} Search;

/* search.c: the mean PAR with the best flow of each scenario. */
double measure(Search *search);
/* Replicas that are not where they were before all. */
int64_t count_loads(const Search *search);
void save(Search *search);
void restore(Search *search);
/* Shifts what can be shifted to an aim between mean and peak, and finds what cannot: in sum, and of which experts. */
void push(Search *search, double aim);
void find_bound(Search *search);

/* spare.c: where one more replica would help, by the round's beginning; then one of them at a time, in the place of
 * one that can be spared. False: there is none. */
void find_places(Search *search);
bool replicate_one(Search *search);

/* swap.c: two experts change places. False: none do. */
bool swap_one(Search *search);

#endif
