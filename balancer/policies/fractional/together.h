/* Plans a layer whose experts' loads move together: see together.c.
 *
 * Letters: T iterations (or means of a few) in vectors of LANES, E experts, S servers, N slots.
 */
#ifndef EAAS_FRACTIONAL_TOGETHER_H
#define EAAS_FRACTIONAL_TOGETHER_H

#include <math.h>
#include <string.h>

#include "layer.h"

#define LANES 8
#define POWER 8
#define TINY 1e-30f
#define FIRST_SWEEPS 2
#define TARGETS 10 /* servers tried for a hot one's load */
#define BLOCK 4    /* vectors, or swaps, evaluated side by side */

/* Sums are added lane by lane, so that a plan is the same whatever vectors a machine has. */
typedef float Lanes __attribute__((vector_size(LANES * sizeof(float))));

/* A part of a hot server's load for another one. */
typedef struct {
    int32_t from, to;
    int32_t heir; /* the slot whose replica takes the tokens of the one that goes; NONE: they swap */
    bool swap;
    float gain;
} Move;

typedef struct {
    int32_t ours, theirs;
} Pair;

/* Swaps of the I slots of a hot server with the J of a target, by the first Q vectors. */
typedef struct {
    Lanes *root_Q;             /* the slope's eighth root: powers of what it scales need no weight */
    Lanes *full_Q, *target_Q;  /* the two servers' fullness, times root_Q */
    Lanes *x_IQ, *y_JQ;
    float *cost_J, *cost_P, *gain_P;
    Pair *pair_P;              /* those that are possible; room for I * J + BLOCK */
    Move *promise_K;           /* over all targets: `promises` of them, room for I * J * TARGETS */
    int32_t promises;
    float top;                 /* the best one's estimate */
} Pairs;

/* State of a start (together_start.c). Servers are in vectors of LANES here, V of them. */
typedef struct {
    struct Together *search;
    int32_t vectors;     /* iterations: the first `vectors` of the search's, ... */
    float weight;        /* ... each of this weight */
    int32_t columns;     /* V */
    Lanes *full_TV;      /* the servers' fullness; NULL: a start would take too long */
    Lanes *mean_V, *variance_V, *pace_V; /* 1 / speed */
    Lanes *cost_V;       /* part of an expert's mean that counts */
    Lanes *block_V;      /* INFINITY: no free slot, or it holds the expert */
    Lanes *then_V;       /* variance with one more replica */
    float *mean_E, *variance_E;
    int32_t *free_S, *expert_N;
    int32_t *common_SS;  /* experts that a server is to hold, and another holds */
    int32_t *place_S, *taken_S, *moved_N;
    int64_t *count_E;
    uint64_t *order_E, *heap_E;
    int32_t *before_N; /* the slots and shares before */
    float *share_N;
} Start;

typedef struct Together {
    Layer *layer;           /* with one scenario: the slots */
    double price;           /* a load must lower the objective by this, ... */
    double anew;            /* ... and those of a start by so many times as much */
    int32_t vectors, screen; /* a first estimate of a gain looks at the first `screen` vectors, ... */
    float scale;             /* ... whose weight is 1 / scale */
    Lanes *load_ET;  /* an expert's load over the servers' mean load of the iteration */
    Lanes *weight_T; /* sum 1 */
    Lanes *full_ST;  /* a server's load over its speed */
    Lanes *power_ST; /* its power, unless dirty_S */
    Lanes *sum_T;    /* sum over servers of the powers */
    Lanes *slope_T;  /* the objective's derivative by sum_T */
    Lanes *hot_T;    /* the objective's derivative by the hot server's fullness */
    float *share_N;
    float *half_N, *all_N; /* gain if a hot server's slot loses a half, or all */
    float *heat_S;         /* a server's part of the objective */
    float *cool_S;         /* how full it is while the hot one is */
    uint8_t *stuck_S;      /* it had no move that pays, and has not changed since */
    uint8_t *dirty_S, *has_SE;
    uint8_t *held_SE;      /* what servers hold before: only other replicas are loads */
    Pairs pairs;
    Start start;
    int32_t iterations;
    int32_t *order_T;      /* of the iterations, in vectors */
    double *factor_T;
    double value;          /* the objective */
} Together;

/* together_plan.c: allocates the arrays of a search in a block, for so many slots of a layer and `most` of a server;
 * NULL: no memory. */
void *begin_search(Together *search, int32_t iterations, int32_t slots, int32_t most);
/* Plans a layer for the loads of iterations (T, E), in the given slots. Returns the shares. */
double *plan_iterations(Together *search, const Held *held, const float *load_TE);

/* together.c: fullness and the objective, from the flow's experts and share_N. */
void begin_together(Together *search);
void add_load(Together *search, int32_t server, int32_t expert, float share);
/* Newton's steps on all shares, in sweeps. */
void level_all(Together *search, int32_t sweeps);
void renew_powers(Together *search);
void evaluate(Together *search);
void make_move(Together *search, const Move *move);

/* together_moves.c: the move of a server's load that gains most; `from` is NONE if none pays. */
Move best_move(Together *search, int32_t hot);
/* ... and swaps that give servers what they held before. */
void return_all(Together *search);

/* together_start.c: begins, with a layout from nothing if that pays. */
void start_together(Together *search);
void place_start(Together *search, Arena *arena, size_t slots);

/* Moves experts between the layer's slots, and shares. Starts with share_N; load_ET, weight_T and held_SE are filled.
 */
void move_together(Together *search);

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
root8(Lanes x)
{
    float value[LANES];
    memcpy(value, &x, sizeof(x));
    for (int32_t i = 0; i < LANES; i++) {
        value[i] = sqrtf(sqrtf(sqrtf(value[i])));
    }
    memcpy(&x, value, sizeof(x));
    return x;
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
