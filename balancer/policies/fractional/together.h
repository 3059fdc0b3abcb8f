/* Plans a layer whose experts' loads move together: see together.c.
 *
 * Letters: T iterations (or means of a few) in vectors of LANES, E experts, S servers, N slots.
 */
#ifndef EAAS_FRACTIONAL_TOGETHER_H
#define EAAS_FRACTIONAL_TOGETHER_H

#include "layer.h"

#define LANES 8

/* Sums are added lane by lane, so that a plan is the same whatever vectors a machine has. */
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

typedef struct {
    Layer *layer;           /* with one scenario: the slots */
    double price;           /* a load must lower the objective by this */
    int32_t vectors, screen;
    Lanes *load_ET;  /* an expert's load over the servers' mean load of the iteration */
    Lanes *weight_T; /* sum 1 */
    Lanes *full_ST;  /* a server's load over its speed */
    Lanes *power_ST; /* its power, unless dirty_S */
    Lanes *sum_T;    /* sum over servers of the powers */
    Lanes *slope_T;  /* the objective's derivative by sum_T */
    Lanes *hot_T;    /* the objective's derivative by the hot server's fullness */
    float *share_N;
    float *half_N, *all_N; /* change and gain if a hot server's slot loses a half, or all */
    float *heat_S;         /* a server's part of the objective */
    float *cool_S;         /* how full it is while the hot one is */
    uint8_t *stuck_S;      /* it had no move that pays, and has not changed since */
    uint8_t *dirty_S, *has_SE;
    uint8_t *held_SE;      /* what servers hold before: only other replicas are loads */
    double value;          /* the objective */
} Together;

/* Bytes of the arrays, and places them in a block of so many, aligned to Lanes. */
size_t together_bytes(int32_t vectors, int32_t servers, int32_t experts, int32_t slots);
void together_init(Together *search, void *block, int32_t slots);

/* Moves experts between the layer's slots, and shares. Starts with share_N; load_ET, weight_T and held_SE are filled.
 * Returns the objective. */
double move_together(Together *search);

#endif
