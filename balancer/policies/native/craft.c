/* CRAFT's three algorithms (appendix A of the paper). */
#include "planning.h"

#include <string.h>

#define LANES 16 /* batches at a time, where there are several */

static inline void
replay_lanes(const float *load_EB, ptrdiff_t lanes, const int wide, ptrdiff_t experts, ptrdiff_t servers,
             const int64_t *count, const int32_t *server, float *filled_SB, double *balancedness)
{
    memset(filled_SB, 0, (size_t)(servers * wide) * sizeof(float));
    for (ptrdiff_t e = 0; e < experts; e++) {
        const float *load = load_EB + e * wide;
        float part[LANES];
        float placed = 0;
        for (int64_t i = 0; i < count[e]; i++) {
            placed += server[i] >= 0;
        }
        for (int b = 0; b < wide; b++) {
            part[b] = load[b] / placed;
        }
        for (int64_t i = 0; i < count[e]; i++) {
            if (server[i] >= 0) {
                float *filled = filled_SB + server[i] * wide;
                for (int b = 0; b < wide; b++) {
                    filled[b] += part[b];
                }
            }
        }
        server += count[e];
    }
    float most[LANES] = {0}, sum[LANES] = {0};
    for (ptrdiff_t s = 0; s < servers; s++) {
        const float *filled = filled_SB + s * wide;
        for (int b = 0; b < wide; b++) {
            most[b] = filled[b] > most[b] ? filled[b] : most[b];
            sum[b] += filled[b];
        }
    }
    for (ptrdiff_t b = 0; b < lanes; b++) {
        *balancedness += most[b] > 0 ? (double)(sum[b] / (float)servers / most[b]) : 1.0;
    }
}

/* Algorithm 1, inner loops: replays batches over a placement, `wide` of them at once (1 or LANES). `balancedness` gets
 * the sum over the first `lanes` of mean / maximum of the servers' loads, 1 for a batch without load. */
static void
replay(const float *load_EB, ptrdiff_t lanes, int wide, ptrdiff_t experts, ptrdiff_t servers, const int64_t *count,
       const int32_t *server, float *filled_SB, double *balancedness)
{
    /* Constants let the compiler unroll the inner loops. */
    if (wide == 1) {
        replay_lanes(load_EB, lanes, 1, experts, servers, count, server, filled_SB, balancedness);
    } else {
        replay_lanes(load_EB, lanes, LANES, experts, servers, count, server, filled_SB, balancedness);
    }
}

/* Algorithm 2: one of the choices, or none, for each layer; the greatest sum of gains with `budget` replicas at
 * most, and no more in a layer than its limit. Of equal sums the one with fewer replicas in the later layers. */
static void
allocate(const double *gain_LK, const int64_t *replicas_K, const int64_t *limit_L, ptrdiff_t layers,
         ptrdiff_t choices, int64_t budget, int64_t *chosen_L, double *best_C, double *next_C, int8_t *choice_LC)
{
    for (int64_t c = 0; c <= budget; c++) {
        best_C[c] = 0;
    }
    for (ptrdiff_t l = 0; l < layers; l++) {
        int8_t *choice_C = choice_LC + l * (budget + 1);
        memcpy(next_C, best_C, (size_t)(budget + 1) * sizeof(double));
        memset(choice_C, 0xff, (size_t)(budget + 1));
        for (ptrdiff_t k = 0; k < choices; k++) {
            double gain = gain_LK[l * choices + k];
            int64_t replicas = replicas_K[k];
            if (replicas > limit_L[l]) {
                continue;
            }
            for (int64_t c = replicas; c <= budget; c++) {
                double sum = best_C[c - replicas] + gain;
                if (sum > next_C[c]) {
                    next_C[c] = sum;
                    choice_C[c] = (int8_t)k;
                }
            }
        }
        double *swap = best_C;
        best_C = next_C;
        next_C = swap;
    }
    int64_t c = budget;
    for (ptrdiff_t l = layers; l-- > 0;) {
        int8_t k = choice_LC[l * (budget + 1) + c];
        chosen_L[l] = k < 0 ? 0 : replicas_K[k];
        c -= chosen_L[l];
    }
}

/* Algorithm 3: the number of each layer's experts on a server. All get the same number; the remainder goes to servers
 * with the fewest experts over all layers, evenly spaced among equals. Unlike in the paper, slots may differ: full
 * servers get no more. `sum` and `tied` are by server. */
static void
interleave(const int64_t *total_L, const int64_t *slots_LS, ptrdiff_t layers, ptrdiff_t servers,
           int64_t *assigned_LS, int64_t *sum_S, int32_t *tied)
{
    memset(sum_S, 0, (size_t)servers * sizeof(*sum_S));
    int64_t *level_L = assigned_LS; /* At [l][0] until the layer is assigned. */
    for (ptrdiff_t l = 0; l < layers; l++) {
        /* The highest level that the replicas suffice for. */
        const int64_t *slots = slots_LS + l * servers;
        int64_t level = 0, used = 0;
        for (;;) {
            int64_t room = 0;
            for (ptrdiff_t s = 0; s < servers; s++) {
                room += slots[s] > level;
            }
            if (room == 0 || used + room > total_L[l]) {
                break;
            }
            used += room;
            level++;
        }
        level_L[l * servers] = level;
        for (ptrdiff_t s = 0; s < servers; s++) {
            sum_S[s] += slots[s] < level ? slots[s] : level;
        }
    }
    for (ptrdiff_t l = 0; l < layers; l++) {
        const int64_t *slots = slots_LS + l * servers;
        int64_t *assigned = assigned_LS + l * servers;
        int64_t level = level_L[l * servers], rest = total_L[l];
        for (ptrdiff_t s = 0; s < servers; s++) {
            assigned[s] = slots[s] < level ? slots[s] : level;
            rest -= assigned[s];
        }
        while (rest > 0) {
            int64_t fewest = INT64_MAX;
            ptrdiff_t size = 0;
            for (ptrdiff_t s = 0; s < servers; s++) {
                if (assigned[s] > level || slots[s] <= level || sum_S[s] > fewest) {
                    continue;
                }
                if (sum_S[s] < fewest) {
                    fewest = sum_S[s];
                    size = 0;
                }
                tied[size++] = (int32_t)s;
            }
            if (size == 0) {
                break;
            }
            int64_t wanted = rest < size ? rest : size;
            for (int64_t i = 0; i < wanted; i++) {
                /* Endpoints included; rounded to the nearest. */
                ptrdiff_t at = wanted > 1 ? (ptrdiff_t)((2 * i * (size - 1) + wanted - 1) / (2 * (wanted - 1))) : 0;
                ptrdiff_t s = tied[at];
                assigned[s]++;
                sum_S[s]++;
            }
            rest -= wanted;
        }
    }
}

/* Adds to `sum` (N, L) the balancedness of each batch (B, L, E) under N compact placements. */
EXPORT int
replay_layers(const float *load_BLE, const int64_t *count, const int32_t *server, ptrdiff_t servers, double *sum,
              ptrdiff_t plans, ptrdiff_t batches, ptrdiff_t layers, ptrdiff_t experts, ptrdiff_t replicas)
{
    ptrdiff_t rows = plans * layers;
    if (servers < 1 || !counts_fit(count, rows, experts, replicas) || !servers_fit(server, rows * replicas, servers)) {
        return OUT_OF_RANGE;
    }
    int wide = batches == 1 ? 1 : LANES;
    float *block = malloc((size_t)(experts + servers) * (size_t)wide * sizeof(*block));
    if (block == NULL) {
        return NO_MEMORY;
    }
    for (ptrdiff_t l = 0; l < layers; l++) {
        for (ptrdiff_t first = 0; first < batches; first += wide) {
            ptrdiff_t lanes = batches - first < wide ? batches - first : wide;
            memset(block, 0, (size_t)(experts * wide) * sizeof(*block));
            for (ptrdiff_t b = 0; b < lanes; b++) {
                const float *load = load_BLE + ((first + b) * layers + l) * experts;
                for (ptrdiff_t e = 0; e < experts; e++) {
                    block[e * wide + b] = load[e];
                }
            }
            for (ptrdiff_t at = l; at < plans * layers; at += layers) {
                replay(block, lanes, wide, experts, servers, count + at * experts, server + at * replicas,
                       block + experts * wide, sum + at);
            }
        }
    }
    free(block);
    return DONE;
}

EXPORT int
interleave_layers(const int64_t *total_L, const int64_t *slots_LS, int64_t *assigned_LS, ptrdiff_t layers,
                  ptrdiff_t servers)
{
    int64_t *sum = malloc((size_t)servers * (sizeof(int64_t) + sizeof(int32_t)));
    if (sum == NULL) {
        return NO_MEMORY;
    }
    interleave(total_L, slots_LS, layers, servers, assigned_LS, sum, (int32_t *)(sum + servers));
    free(sum);
    return DONE;
}

/* The replicas (K) of each layer with the greatest sum of gains (L, K), within `budget` and limits (L). */
EXPORT int
allocate_layers(const double *gain_LK, const int64_t *replicas_K, const int64_t *limit_L, int64_t budget,
                int64_t *chosen_L, ptrdiff_t layers, ptrdiff_t choices)
{
    bool fits = budget >= 0 && choices <= INT8_MAX;
    for (ptrdiff_t k = 0; k < choices; k++) {
        fits &= replicas_K[k] > 0;
    }
    if (!fits) {
        return OUT_OF_RANGE;
    }
    size_t width = (size_t)budget + 1;
    double *memory = malloc(width * (2 * sizeof(double) + (size_t)layers));
    if (memory == NULL) {
        return NO_MEMORY;
    }
    allocate(gain_LK, replicas_K, limit_L, layers, choices, budget, chosen_L, memory, memory + width,
             (int8_t *)(memory + 2 * width));
    free(memory);
    return DONE;
}
