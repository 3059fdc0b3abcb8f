/* Plans layers whose experts' loads move together: arrays in, together.h for each layer, arrays out. */
#include <stdlib.h>
#include <string.h>

#include "../native/export.h"
#include "../native/keys.h"
#include "../native/sparse.h"
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
begin_order(Together *search, int32_t iterations, int32_t *order_T)
{
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
begin_loads(Together *search, const float *load_TE, const int32_t *order_T, double *factor_T, int32_t iterations,
            double speed)
{
    const Layer *layer = search->layer;
    int32_t experts = layer->experts, padded = search->vectors * LANES;
    for (int32_t t = 0; t < iterations; t++) {
        double sum = sum_row(load_TE + (ptrdiff_t)order_T[t] * experts, experts);
        factor_T[t] = sum > 0 ? speed / sum : 0;
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

/* From flows of any unit. */
static void
begin_shares(Together *search)
{
    const Flow *flow = &search->layer->flow_B[0];
    for (int32_t e = 0; e < search->layer->experts; e++) {
        double sum = 0, even = 1.0 / replicas(flow, e);
        for (int32_t n = flow->head_E[e]; n != NONE; n = flow->next_N[n]) {
            sum += flow->flow_N[n];
        }
        for (int32_t n = flow->head_E[e]; n != NONE; n = flow->next_N[n]) {
            search->share_N[n] = (float)(sum > 0 ? flow->flow_N[n] / sum : even);
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

/* As write_rows. */
static int64_t
write_together(const Together *search, int64_t at, int64_t *end_S, int32_t *expert, double *share)
{
    const Flow *flow = &search->layer->flow_B[0];
    double *share_N = search->layer->scratch;
    for (int32_t n = 0; n < flow->slots; n++) {
        share_N[n] = flow->expert_N[n] == NONE ? 0 : search->share_N[n];
    }
    return write_rows(flow, share_N, at, end_S, expert, share);
}

/* A sparse layout (as of plan_fractional) for the loads of T iterations (L, T, E) and slots (L, S, E at most each),
 * from a current one of the same form (NULL: nothing is held) and its shares (NULL: not known). `price`, `anew`:
 * see `Together`. */
EXPORT int
plan_together(const float *load_LTE, const int64_t *slots_LS, const double *speed_S, const int64_t *now_X,
              const int32_t *now_M, const double *now_share_M, double price, double anew, int64_t *first_X,
              int32_t *expert_N, double *share_N, ptrdiff_t layers, ptrdiff_t iterations, ptrdiff_t servers, ptrdiff_t experts,
              ptrdiff_t ends, ptrdiff_t held_size, ptrdiff_t room)
{
    if (servers < 1 || experts < 1 || iterations < 1 || ends != layers * servers + 1) {
        return OUT_OF_RANGE;
    }
    if (now_X != NULL && (now_M == NULL || !rows_fit(now_X, ends, now_M, held_size, experts))) {
        return OUT_OF_RANGE;
    }
    if (experts > MOST_ITEMS || servers > INT32_MAX / 16 / experts || iterations > INT32_MAX / 16 / experts) {
        return TOO_MANY;
    }
    int64_t slots = count_slots(slots_LS, layers, servers, experts, room);
    if (slots < 0) {
        return OUT_OF_RANGE;
    }
    int32_t s = (int32_t)servers, e = (int32_t)experts, n = (int32_t)slots;
    int32_t vectors = (int32_t)((iterations + LANES - 1) / LANES);
    double speed = 0;
    for (int32_t i = 0; i < s; i++) {
        speed += speed_S[i];
    }
    int32_t most = 0;
    for (ptrdiff_t i = 0; i < layers * servers; i++) {
        most = slots_LS[i] > most ? (int32_t)slots_LS[i] : most;
    }
    Flow flow;
    int32_t padded = vectors * LANES;
    int32_t *first_S = malloc(((size_t)servers + 1) * sizeof(*first_S));
    double *factor_T = malloc((size_t)padded * (sizeof(*factor_T) + sizeof(int32_t)));
    int32_t *order_T = factor_T == NULL ? NULL : (int32_t *)(factor_T + padded);
    char *flow_block = malloc(flow_bytes(s, e, n));
    void *block = aligned_alloc(sizeof(Lanes), together_bytes(vectors, s, e, n, most));
    Layer layer = {.scenarios = 1, .servers = s, .experts = e, .first_S = first_S, .speed_S = speed_S, .flow_B = &flow};
    layer.load_E = malloc((size_t)experts * sizeof(double));
    layer.load_BE = malloc((size_t)experts * sizeof(double));
    layer.scratch = malloc(scratch_doubles(1, s, e, n) * sizeof(double));
    layer.counts = malloc(scratch_counts(s, e, n) * sizeof(int32_t));
    Together search = {.layer = &layer, .vectors = vectors, .price = price, .anew = anew};
    bool fits = first_S && factor_T && flow_block && block && layer.load_E && layer.load_BE && layer.scratch && layer.counts;
    if (fits) {
        together_init(&search, block, n, most);
        begin_order(&search, (int32_t)iterations, order_T);
    }
    int64_t at = 0;
    first_X[0] = 0;
    for (ptrdiff_t l = 0; fits && l < layers; l++) {
        Held held = {.first_S = now_X == NULL ? NULL : now_X + l * servers, .expert = now_M, .share = now_share_M};
        first_S[0] = 0;
        for (int32_t i = 0; i < s; i++) {
            first_S[i + 1] = first_S[i] + (int32_t)slots_LS[l * servers + i];
        }
        flow_init(&flow, flow_block, s, e, first_S, speed_S);
        begin_loads(&search, load_LTE + l * iterations * experts, order_T, factor_T, (int32_t)iterations, speed);
        begin_held(&search, &held);
        if (held.first_S != NULL) {
            keep(&layer, &held);
        } else {
            fill(&layer);
        }
        begin_shares(&search);
        move_together(&search);
        at = write_together(&search, at, first_X + l * servers + 1, expert_N, share_N);
    }
    void *blocks[] = {first_S, factor_T, flow_block, block, layer.load_E, layer.load_BE, layer.scratch, layer.counts};
    for (size_t i = 0; i < sizeof(blocks) / sizeof(*blocks); i++) {
        free(blocks[i]);
    }
    return fits ? DONE : NO_MEMORY;
}
