/* The loops of the selection strategies, without Python.
 *
 * Letters: W requests of the window, E experts (of all layers), R replicas (sorted by server), S servers (of all
 * layers). Nothing is checked here: the caller has checked all lengths and indices, and 0 <= have <= take <= W.
 *
 * `chosen` holds `take` indices; its first `have` are given and distinct. `left` is scratch for W indices.
 */
#ifndef EAAS_SCHEDULER_SELECT_H
#define EAAS_SCHEDULER_SELECT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Adds these rows of the window to the load. */
void add_rows(double *load_E, const double *window_WE, ptrdiff_t experts, const int64_t *rows, ptrdiff_t count);

/* Sum and sum of squares. */
void measure(const double *load_E, ptrdiff_t experts, double *sum, double *squares);

/* Score of a candidate v given the load L so far; less is better:
 *   2 L.v + square * |v|^2 - 2 level * sum(v) - variance * (2 sum(L) sum(v) + sum(v)^2) / E
 */
typedef struct {
    double square, level, variance;
} Objective;

/* Adds the best candidate until `take` are chosen. load_E is the start load and becomes the total load. If draws is not
 * NULL, each step considers only `sample` candidates, drawn with `sample` numbers in [0, 1). terms_W2 is scratch. */
void choose_greedily(const double *window_WE, ptrdiff_t window, ptrdiff_t experts, const Objective *objective,
                     const double *draws, ptrdiff_t sample, double *load_E, double *terms_W2, int64_t *left,
                     int64_t *chosen, ptrdiff_t have, ptrdiff_t take);

/* Adds, until `take` are chosen, the request that keeps the hottest expert's load least; of equals the one with the
 * highest peak. peak_W is scratch. */
void choose_least_peak(const double *window_WE, ptrdiff_t window, ptrdiff_t experts, double *load_E, double *peak_W,
                       int64_t *left, int64_t *chosen, ptrdiff_t have, ptrdiff_t take);

/* A placement's replicas: replica r of expert_R[r] takes share_R[r] of its load; server s holds the replicas from
 * first_S[s] to before first_S[s + 1]. `servers` counts each server once per layer, layer by layer. A step takes the sum
 * over the layers of the largest max(load_s * active experts, pair_s * pairs) of a server. */
typedef struct {
    ptrdiff_t replicas, servers, layers;
    const int32_t *expert_R;
    const double *share_R;
    const int64_t *first_S;
    double load_s, pair_s;
} Servers;

/* Requests scored together in registers; rows are padded to a multiple of it. */
enum { FOLDED_BLOCK = 16 };

static inline ptrdiff_t
folded_stride(ptrdiff_t window)
{
    return (window + FOLDED_BLOCK - 1) / FOLDED_BLOCK * FOLDED_BLOCK;
}

/* Floats of scratch for the next two functions. */
static inline size_t
folded_floats(const Servers *servers, ptrdiff_t window, ptrdiff_t experts)
{
    size_t rows = (size_t)(servers->replicas + servers->servers);
    return (size_t)folded_stride(window) * ((size_t)experts + rows + 1) + rows;
}

/* Like choose_greedily, for the time of a step. */
void choose_for_servers(const double *window_WE, ptrdiff_t window, ptrdiff_t experts, const Servers *servers,
                        const double *load_E, float *scratch, int64_t *left, int64_t *chosen, ptrdiff_t have,
                        ptrdiff_t take);

/* Total step time of the window in batches of that size: by age, and with each batch chosen around its oldest request. */
void compare_orders(const double *window_WE, ptrdiff_t window, ptrdiff_t experts, const Servers *servers,
                    ptrdiff_t batch, float *scratch, int64_t *left, double *by_age, double *by_choice);

/* Seconds of a step with this load. */
double step_time(const Servers *servers, const double *load_E);

/* Splits the window, a multiple of `groups`, into groups of equal size by the balanced largest differencing method:
 * repeatedly joins the two partial splits whose groups differ most, so that they compensate. group_W becomes the group of
 * each request. scratch holds W * E + 2 W doubles, indices 4 W indices. */
void split_by_difference(const double *window_WE, ptrdiff_t window, ptrdiff_t experts, ptrdiff_t groups,
                         double *scratch, int64_t *indices, int64_t *group_W);

#endif
