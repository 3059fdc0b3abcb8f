/* The loops behind the selection strategies; no Python in here.
 *
 * Letters: W requests of the window, E experts (of all layers), R replicas (sorted by server), S servers (of all layers). Nothing is checked here: every
 * array is long enough, every index in range, 0 <= have <= take <= W; whoever calls has seen to it.
 *
 * `chosen` has room for `take` indices; its first `have` are given and distinct. `left` is scratch for W indices.
 */
#ifndef EAAS_SCHEDULER_SELECT_H
#define EAAS_SCHEDULER_SELECT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Adds those rows of the window. */
void add_rows(double *load_E, const double *window_WE, ptrdiff_t experts, const int64_t *rows, ptrdiff_t count);

/* Sum and sum of squares. */
void measure(const double *load_E, ptrdiff_t experts, double *sum, double *squares);

/* What a candidate v is worth beside the load L so far, less being better:
 *   2 L.v + square * |v|^2 - 2 level * sum(v) - variance * (2 sum(L) sum(v) + sum(v)^2) / E
 */
typedef struct {
    double square, level, variance;
} Objective;

/* Adds the best candidate until `take` are chosen. load_E is the load to begin with and becomes that of the chosen ones
 * too. Where draws is not NULL, each step looks only at `sample` candidates, drawn with `sample` of the numbers in [0, 1).
 * terms_W2 is scratch. */
void choose_greedily(const double *window_WE, ptrdiff_t window, ptrdiff_t experts, const Objective *objective,
                     const double *draws, ptrdiff_t sample, double *load_E, double *terms_W2, int64_t *left,
                     int64_t *chosen, ptrdiff_t have, ptrdiff_t take);

/* Adds, until `take` are chosen, the request after which the hottest expert is least loaded; of equals the one that is
 * hottest by itself. peak_W is scratch. */
void choose_least_peak(const double *window_WE, ptrdiff_t window, ptrdiff_t experts, double *load_E, double *peak_W,
                       int64_t *left, int64_t *chosen, ptrdiff_t have, ptrdiff_t take);

/* A placement's replicas: replica r of expert_R[r] takes share_R[r] of its load; server s has those from first_S[s] to
 * before first_S[s + 1]. A server is counted once for each of `layers`, of which there are servers / layers in each, layer
 * by layer. A step takes the largest, over a layer's servers, of max(load_s * active experts, pair_s * pairs); and the sum
 * of that over the layers. */
typedef struct {
    ptrdiff_t replicas, servers, layers;
    const int32_t *expert_R;
    const double *share_R;
    const int64_t *first_S;
    double load_s, pair_s;
} Servers;

/* Requests that are looked at together, in registers; a row of requests is filled up to a multiple of that. */
enum { FOLDED_BLOCK = 16 };

static inline ptrdiff_t
folded_stride(ptrdiff_t window)
{
    return (window + FOLDED_BLOCK - 1) / FOLDED_BLOCK * FOLDED_BLOCK;
}

/* Of scratch, for the next two. */
static inline size_t
folded_floats(const Servers *servers, ptrdiff_t window, ptrdiff_t experts)
{
    size_t rows = (size_t)(servers->replicas + servers->servers);
    return (size_t)folded_stride(window) * ((size_t)experts + rows + 1) + rows;
}

/* As choose_greedily, for the time of a step. */
void choose_for_servers(const double *window_WE, ptrdiff_t window, ptrdiff_t experts, const Servers *servers,
                        const double *load_E, float *scratch, int64_t *left, int64_t *chosen, ptrdiff_t have,
                        ptrdiff_t take);

/* The step times of all requests of the window in batches of that size: by age, and with each batch chosen in turn beside
 * the oldest that is left. */
void compare_orders(const double *window_WE, ptrdiff_t window, ptrdiff_t experts, const Servers *servers,
                    ptrdiff_t batch, float *scratch, int64_t *left, double *by_age, double *by_choice);

/* The time of a step with that load, in seconds. */
double step_time(const Servers *servers, const double *load_E);

/* Splits the window, a multiple of `groups`, into groups of equal size by the balanced largest differencing method:
 * repeatedly join the two partial splits whose groups differ most, so that they make up for each other. group_W becomes
 * the group of each request. scratch has room for W * E + 2 W doubles and 4 W indices. */
void split_by_difference(const double *window_WE, ptrdiff_t window, ptrdiff_t experts, ptrdiff_t groups,
                         double *scratch, int64_t *indices, int64_t *group_W);

#endif
