/* Begins a search over iterations: its arrays, and a layer's loads. */
#include <stdlib.h>
#include <string.h>

#include "together.h"

/* By this part an expert's load is further from its mean than in the window: the next windows hold other iterations,
 * and a search for the least F finds the places where these were small by chance. */
#define FURTHER 0.2f

/* Every few iterations a mean is one of the first, by which moves are estimated, if there are enough of them. */
#define SCREEN 4
#define SCREEN_FROM 8 /* vectors */

/* The order of the iterations in the vectors: every fourth comes first, so that the first vectors are a sample.
   Fills order_T (NONE: no iteration), and `screen`. */
static void
begin_order(Together *search)
{
    int32_t iterations = search->iterations, *order_T = search->order_T;
    int32_t padded = search->vectors * LANES, at = 0, turns = search->vectors < SCREEN_FROM ? 1 : SCREEN;
    for (int32_t turn = 0; turn < turns; turn++) {
        for (int32_t t = (turn + turns / 2) % turns; t < iterations; t += turns) {
            order_T[at++] = t;
        }
    }
    float *weight_T = (float *)search->weight_T, screened = 0;
    search->screen = search->vectors / turns;
    for (int32_t t = 0; t < padded; t++) {
        order_T[t] = t < iterations ? order_T[t] : NONE;
        weight_T[t] = t < iterations ? 1 / (float)iterations : 0;
        screened += t < search->screen * LANES ? weight_T[t] : 0;
    }
    search->scale = 1 / screened;
}

/* Sum of a row, added in eight parts. */
static double
sum_row(const float *load_E, int32_t experts)
{
    double part[LANES] = {0}, sum = 0;
    int32_t e = 0;
    for (; e + LANES <= experts; e += LANES) {
        for (int32_t i = 0; i < LANES; i++) {
            part[i] += load_E[e + i];
        }
    }
    for (; e < experts; e++) {
        sum += load_E[e];
    }
    for (int32_t i = 0; i < LANES; i++) {
        sum += part[i];
    }
    return sum;
}

/* Loads of the iterations over their mean per unit of speed, further from the window's mean; those of an empty iteration
 * are 0. */
static void
begin_loads(Together *search, const float *load_TE)
{
    const Layer *layer = search->layer;
    const int32_t *order_T = search->order_T;
    int32_t experts = layer->experts, padded = search->vectors * LANES, iterations = search->iterations;
    double *factor_T = search->factor_T;
    for (int32_t t = 0; t < iterations; t++) {
        double sum = sum_row(load_TE + (ptrdiff_t)order_T[t] * experts, experts);
        factor_T[t] = sum > 0 ? layer->speed / sum : 0;
    }
    /* Some experts at a time, whose loads of an iteration are in one line of the cache. */
    for (int32_t e = 0; e < experts; e += LANES) {
        int32_t some = experts - e < LANES ? experts - e : LANES;
        float *load_ET = (float *)(search->load_ET + (ptrdiff_t)e * search->vectors);
        double sum_E[LANES] = {0};
        for (int32_t t = 0; t < iterations; t++) {
            const float *load_E = load_TE + (ptrdiff_t)order_T[t] * experts + e;
            for (int32_t i = 0; i < some; i++) {
                float load = (float)(load_E[i] * factor_T[t]);
                sum_E[i] += load;
                load_ET[i * padded + t] = load;
            }
        }
        for (int32_t i = 0; i < some; i++) {
            float mean = (float)(sum_E[i] / iterations), *load_T = load_ET + i * padded;
            layer->load_BE[e + i] = layer->load_E[e + i] = sum_E[i];
            for (int32_t t = 0; t < padded; t++) {
                float load = t < iterations ? load_T[t] + FURTHER * (load_T[t] - mean) : 0;
                load_T[t] = load > 0 ? load : 0;
            }
        }
    }
}

static void
begin_held(Together *search, const Held *held)
{
    size_t servers = (size_t)search->layer->servers, experts = (size_t)search->layer->experts;
    memset(search->held_SE, 0, servers * experts);
    for (size_t s = 0; held->first_S != NULL && s < servers; s++) {
        for (int64_t i = held->first_S[s]; i < held->first_S[s + 1]; i++) {
            search->held_SE[s * experts + (size_t)held->expert[i]] = 1;
        }
    }
}

/* `slots` of a layer, `most` of a server. */
static void
place_arrays(Together *search, Arena *arena, size_t slots, size_t most)
{
    size_t t = (size_t)search->vectors, s = (size_t)search->layer->servers, e = (size_t)search->layer->experts;
    size_t swaps = most * most + BLOCK;
    Pairs *pairs = &search->pairs;
    search->load_ET = carve(arena, e * t, sizeof(Lanes));
    search->full_ST = carve(arena, s * t, sizeof(Lanes));
    search->power_ST = carve(arena, s * t, sizeof(Lanes));
    pairs->x_IQ = carve(arena, most * t, sizeof(Lanes));
    pairs->y_JQ = carve(arena, most * t, sizeof(Lanes));
    Lanes **by_time[] = {&search->weight_T, &search->sum_T, &search->slope_T, &search->hot_T,
                         &pairs->root_Q, &pairs->full_Q, &pairs->target_Q};
    for (size_t i = 0; i < sizeof(by_time) / sizeof(*by_time); i++) {
        *by_time[i] = carve(arena, t, sizeof(Lanes));
    }
    pairs->promise_K = carve(arena, TARGETS * most * most, sizeof(Move));
    pairs->pair_P = carve(arena, swaps, sizeof(Pair));
    pairs->cost_J = carve(arena, most, sizeof(float));
    pairs->cost_P = carve(arena, swaps, sizeof(float));
    pairs->gain_P = carve(arena, swaps, sizeof(float));
    float **by_slot[] = {&search->share_N, &search->half_N, &search->all_N};
    for (size_t i = 0; i < sizeof(by_slot) / sizeof(*by_slot); i++) {
        *by_slot[i] = carve(arena, slots, sizeof(float));
    }
    search->heat_S = carve(arena, s, sizeof(float));
    search->cool_S = carve(arena, s, sizeof(float));
    search->stuck_S = carve(arena, s, 1);
    search->dirty_S = carve(arena, s, 1);
    search->has_SE = carve(arena, s * e, 1);
    search->held_SE = carve(arena, s * e, 1);
    search->factor_T = carve(arena, t * LANES, sizeof(double));
    search->order_T = carve(arena, t * LANES, sizeof(int32_t));
    place_start(search, arena, slots);
}

void *
begin_search(Together *search, int32_t iterations, int32_t slots, int32_t most)
{
    Arena arena = {0};
    search->vectors = (iterations + LANES - 1) / LANES;
    search->iterations = iterations;
    place_arrays(search, &arena, (size_t)slots, (size_t)most);
    arena.block = aligned_alloc(ALIGNMENT, arena.used);
    arena.used = 0;
    if (arena.block != NULL) {
        place_arrays(search, &arena, (size_t)slots, (size_t)most);
        begin_order(search);
    }
    return arena.block;
}

double *
plan_iterations(Together *search, const Held *held, const float *load_TE)
{
    Layer *layer = search->layer;
    Flow *flow = &layer->flow_B[0];
    begin_loads(search, load_TE);
    begin_held(search, held);
    begin_slots(layer, held);
    make_shares(flow);
    for (int32_t n = 0; n < flow->slots; n++) {
        search->share_N[n] = (float)flow->flow_N[n];
    }
    move_together(search);
    double *share_N = (double *)layer->scratch;
    for (int32_t n = 0; n < flow->slots; n++) {
        share_N[n] = flow->expert_N[n] == NONE ? 0 : search->share_N[n];
    }
    return share_N;
}
