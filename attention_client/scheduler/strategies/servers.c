/* Choices by the time of the expert servers: see select.h. */
#include "rows.h"
#include "select.h"

/* exp(-x) for x >= 0, within 1e-6: no call in the loop, so that the compiler can do several at once. */
static inline float
decay(float x)
{
    float y = x * 1.44269504f; /* 2^-y */
    y = y < 125.0f ? y : 125.0f;
    int32_t whole = (int32_t)y;
    float f = ((float)whole - y) * 0.693147181f; /* exp(f), f in (-0.7, 0] */
    float series = 1.0f + f * (1.0f + f * (0.5f + f * (1.0f / 6 + f * (1.0f / 24 + f * (1.0f / 120 + f * (1.0f / 720))))));
    union {
        int32_t bits;
        float value;
    } power = {.bits = (127 - whole) << 23};
    return series * power.value;
}

/* The pairs that each server gets of a load, and how likely each replica gets none (Poisson). */
static void
fold(const Servers *servers, const double *load_E, float *pairs_S, float *idle_R)
{
    for (ptrdiff_t r = 0; r < servers->replicas; r++) {
        idle_R[r] = (float)(servers->share_R[r] * load_E[servers->expert_R[r]]);
    }
    for (ptrdiff_t s = 0; s < servers->servers; s++) {
        pairs_S[s] = 0;
        for (int64_t r = servers->first_S[s]; r < servers->first_S[s + 1]; r++) {
            pairs_S[s] += idle_R[r];
        }
    }
    for (ptrdiff_t r = 0; r < servers->replicas; r++) {
        idle_R[r] = decay(idle_R[r]);
    }
}

/* Eight sums side by side, as in `dot`. */
static float
dot_of_floats(const float *a, const float *b, ptrdiff_t n)
{
    float sum[8] = {0}, rest = 0;
    ptrdiff_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (ptrdiff_t lane = 0; lane < 8; lane++) {
            sum[lane] += a[i + lane] * b[i + lane];
        }
    }
    for (; i < n; i++) {
        rest += a[i] * b[i];
    }
    return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7])) + rest;
}

/* Of a server: it reads the weights of its active experts, and computes its pairs. */
static inline double
server_time(const Servers *servers, double active, double pairs)
{
    double weights_s = servers->load_s * active, compute_s = servers->pair_s * pairs;
    return weights_s > compute_s ? weights_s : compute_s;
}

/* Of each layer the largest time of a server plus the mean of all: the largest alone says nothing of what is added
 * elsewhere. */
static double
worth(const Servers *servers, const float *pairs_S, const float *idle_R, const float *more_pairs_S,
      const float *more_idle_R)
{
    ptrdiff_t of_layer = servers->servers / servers->layers;
    double all_largest = 0, sum = 0;
    for (ptrdiff_t s = 0; s < servers->servers;) {
        double largest = 0;
        for (ptrdiff_t end = s + of_layer; s < end; s++) {
            int64_t first = servers->first_S[s], count = servers->first_S[s + 1] - first;
            double active = (double)count - (double)dot_of_floats(idle_R + first, more_idle_R + first, count);
            double time_s = server_time(servers, active, (double)(pairs_S[s] + more_pairs_S[s]));
            largest = time_s > largest ? time_s : largest;
            sum += time_s;
        }
        all_largest += largest;
    }
    return all_largest + sum / (double)of_layer;
}

/* A window and a batch, folded through the placement. */
typedef struct {
    float *idle_WR, *pairs_WS; /* of each request */
    float *idle_R, *pairs_S;   /* of the batch so far */
} Folded;

static Folded
fold_window(const double *window_WE, ptrdiff_t window, ptrdiff_t experts, const Servers *servers, float *scratch)
{
    Folded folded = {.idle_WR = scratch};
    folded.idle_R = folded.idle_WR + window * servers->replicas;
    folded.pairs_WS = folded.idle_R + servers->replicas;
    folded.pairs_S = folded.pairs_WS + window * servers->servers;
    for (ptrdiff_t w = 0; w < window; w++) {
        fold(servers, window_WE + w * experts, folded.pairs_WS + w * servers->servers,
             folded.idle_WR + w * servers->replicas);
    }
    return folded;
}

static void
clear_batch(const Servers *servers, const Folded *folded)
{
    for (ptrdiff_t s = 0; s < servers->servers; s++) {
        folded->pairs_S[s] = 0;
    }
    for (ptrdiff_t r = 0; r < servers->replicas; r++) {
        folded->idle_R[r] = 1;
    }
}

static void
add_request(const Servers *servers, const Folded *folded, int64_t request)
{
    const float *more_pairs_S = folded->pairs_WS + request * servers->servers;
    const float *more_idle_R = folded->idle_WR + request * servers->replicas;
    for (ptrdiff_t s = 0; s < servers->servers; s++) {
        folded->pairs_S[s] += more_pairs_S[s];
    }
    for (ptrdiff_t r = 0; r < servers->replicas; r++) {
        folded->idle_R[r] *= more_idle_R[r];
    }
}

/* Adds the best of those that are left to the batch, and takes it out of them. */
static int64_t
add_best(const Servers *servers, const Folded *folded, int64_t *left, ptrdiff_t *count)
{
    double least = 0;
    ptrdiff_t best = 0;
    for (ptrdiff_t i = 0; i < *count; i++) {
        double score = worth(servers, folded->pairs_S, folded->idle_R, folded->pairs_WS + left[i] * servers->servers,
                             folded->idle_WR + left[i] * servers->replicas);
        if (i == 0 || score < least) {
            least = score;
            best = i;
        }
    }
    int64_t request = left[best];
    add_request(servers, folded, request);
    take_out(left, (*count)--, best);
    return request;
}

void
choose_for_servers(const double *window_WE, ptrdiff_t window, ptrdiff_t experts, const Servers *servers,
                   const double *load_E, float *scratch, int64_t *left, int64_t *chosen, ptrdiff_t have, ptrdiff_t take)
{
    if (have == take) {
        return;
    }
    Folded folded = fold_window(window_WE, window, experts, servers, scratch);
    fold(servers, load_E, folded.pairs_S, folded.idle_R);
    for (ptrdiff_t c = 0; c < have; c++) {
        add_request(servers, &folded, chosen[c]);
    }
    ptrdiff_t count = list_left(left, window, chosen, have);
    for (; have < take; have++) {
        chosen[have] = add_best(servers, &folded, left, &count);
    }
}

/* Of the batch so far. */
static double
batch_time(const Servers *servers, const Folded *folded)
{
    ptrdiff_t of_layer = servers->servers / servers->layers;
    double all_largest = 0;
    for (ptrdiff_t s = 0; s < servers->servers;) {
        double largest = 0;
        for (ptrdiff_t end = s + of_layer; s < end; s++) {
            double active = 0;
            for (int64_t r = servers->first_S[s]; r < servers->first_S[s + 1]; r++) {
                active += 1.0 - (double)folded->idle_R[r];
            }
            double time_s = server_time(servers, active, (double)folded->pairs_S[s]);
            largest = time_s > largest ? time_s : largest;
        }
        all_largest += largest;
    }
    return all_largest;
}

void
compare_orders(const double *window_WE, ptrdiff_t window, ptrdiff_t experts, const Servers *servers, ptrdiff_t batch,
               float *scratch, int64_t *left, double *by_age, double *by_choice)
{
    Folded folded = fold_window(window_WE, window, experts, servers, scratch);
    *by_age = *by_choice = 0;
    for (ptrdiff_t begin = 0; begin < window; begin += batch) {
        clear_batch(servers, &folded);
        for (ptrdiff_t w = begin; w < begin + batch && w < window; w++) {
            add_request(servers, &folded, w);
        }
        *by_age += batch_time(servers, &folded);
    }
    ptrdiff_t count = list_left(left, window, NULL, 0);
    while (count > 0) {
        clear_batch(servers, &folded);
        add_request(servers, &folded, left[0]);
        take_out(left, count--, 0);
        if (count < batch) { /* all that are left go */
            for (; count > 0; count--) {
                add_request(servers, &folded, left[count - 1]);
            }
        }
        for (ptrdiff_t taken = 1; taken < batch && count > 0; taken++) {
            add_best(servers, &folded, left, &count);
        }
        *by_choice += batch_time(servers, &folded);
    }
}

double
step_time(const Servers *servers, const double *load_E)
{
    ptrdiff_t of_layer = servers->servers / servers->layers;
    double all_largest = 0;
    for (ptrdiff_t s = 0; s < servers->servers;) {
        double largest = 0;
        for (ptrdiff_t end = s + of_layer; s < end; s++) {
            double pairs = 0, active = 0;
            for (int64_t r = servers->first_S[s]; r < servers->first_S[s + 1]; r++) {
                double here = servers->share_R[r] * load_E[servers->expert_R[r]];
                pairs += here;
                active += 1.0 - (double)decay((float)here);
            }
            double time_s = server_time(servers, active, pairs);
            largest = time_s > largest ? time_s : largest;
        }
        all_largest += largest;
    }
    return all_largest;
}
