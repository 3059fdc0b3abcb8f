/* Plans a layer whose experts' loads move together: see together.c.
 *
 * Letters: T iterations (or means of a few) in vectors of LANES, E experts, S servers, N slots.
 */
#ifndef EAAS_FRACTIONAL_TOGETHER_H
#define EAAS_FRACTIONAL_TOGETHER_H

#include <string.h>

#include "layer.h"

#define LANES 8
#define POWER 8
#define TINY 1e-30f
#define FIRST_SWEEPS 3

/* Sums are added lane by lane, so that a plan is the same whatever vectors a machine has. */
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

/* Swaps of the I slots of a hot server with the J of a target, on Q vectors. */
typedef struct {
    Lanes *full_Q, *target_Q, *slope_Q, *x_IQ, *y_JQ;
    float *gain_IJ;
} Pairs;

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
    Pairs pairs;
    void *start_block;     /* start_bytes() of them */
    double value;          /* the objective */
} Together;

/* Bytes of the arrays, and places them in a block of so many, aligned to Lanes. `most`: slots of a server. */
size_t together_bytes(int32_t vectors, int32_t servers, int32_t experts, int32_t slots, int32_t most);
void together_init(Together *search, void *block, int32_t slots, int32_t most);

/* together.c: fullness and the objective, from the flow's experts and share_N. */
void begin_together(Together *search);
void add_load(Together *search, int32_t server, int32_t expert, float share);
/* Newton's steps on all shares, in sweeps. */
void level_all(Together *search, int32_t sweeps);

/* A part of a hot server's load for another one. */
typedef struct {
    int32_t from, to;
    int32_t heir; /* the slot whose replica takes the tokens of the one that goes; NONE: they swap */
    bool swap;
    float gain;
} Move;

/* together_moves.c: the move of a server's load that gains most; `from` is NONE if none pays. */
Move best_move(Together *search, int32_t hot);

/* together_start.c: begins, with another layout if nobody planned the one in the flow and that pays. */
void start_together(Together *search);
size_t start_bytes(int32_t servers, int32_t experts, int32_t slots);

/* Moves experts between the layer's slots, and shares. Starts with share_N; load_ET, weight_T and held_SE are filled.
 * Returns the objective. */
double move_together(Together *search);

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

static inline float
total(Lanes x)
{
    typedef float Half __attribute__((vector_size(LANES / 2 * sizeof(float))));
    Half low, high;
    memcpy(&low, &x, sizeof(low));
    memcpy(&high, (const char *)&x + sizeof(low), sizeof(high));
    low += high;
    return (low[0] + low[2]) + (low[1] + low[3]);
}

static inline const Lanes *
load_of(const Together *search, int32_t expert)
{
    return search->load_ET + (size_t)expert * (size_t)search->vectors;
}

static inline Lanes *
full_of(const Together *search, int32_t server)
{
    return search->full_ST + (size_t)server * (size_t)search->vectors;
}

static inline bool
was_held(const Together *search, int32_t server, int32_t expert)
{
    return search->held_SE[(size_t)server * (size_t)search->layer->experts + (size_t)expert];
}

static inline bool
has(const Together *search, int32_t server, int32_t expert)
{
    return search->has_SE[(size_t)server * (size_t)search->layer->experts + (size_t)expert];
}

static inline Lanes
power6(Lanes x)
{
    Lanes x2 = x * x;
    return x2 * x2 * x2;
}

static inline Lanes
power8(Lanes x)
{
    Lanes x2 = x * x, x4 = x2 * x2;
    return x4 * x4;
}

#endif
