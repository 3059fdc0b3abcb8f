/* See select.h. */
#include "select.h"

#include <string.h>

/* Four sums side by side: the compiler may not reorder one sum of doubles by itself. */
static double
dot(const double *a, const double *b, ptrdiff_t n)
{
    double sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0;
    ptrdiff_t i = 0;
    for (; i + 4 <= n; i += 4) {
        sum0 += a[i] * b[i];
        sum1 += a[i + 1] * b[i + 1];
        sum2 += a[i + 2] * b[i + 2];
        sum3 += a[i + 3] * b[i + 3];
    }
    for (; i < n; i++) {
        sum0 += a[i] * b[i];
    }
    return (sum0 + sum1) + (sum2 + sum3);
}

static double
total(const double *a, ptrdiff_t n)
{
    double sum = 0;
    for (ptrdiff_t i = 0; i < n; i++) {
        sum += a[i];
    }
    return sum;
}

static void
add_to(double *load_E, const double *row_E, ptrdiff_t experts)
{
    for (ptrdiff_t e = 0; e < experts; e++) {
        load_E[e] += row_E[e];
    }
}

/* The indices that are not chosen yet, ascending: the oldest request wins where two are equal. */
static ptrdiff_t
list_left(int64_t *left, ptrdiff_t window, const int64_t *chosen, ptrdiff_t have)
{
    ptrdiff_t count = 0;
    for (ptrdiff_t w = 0; w < window; w++) {
        bool is_chosen = false;
        for (ptrdiff_t c = 0; c < have; c++) {
            is_chosen |= chosen[c] == w;
        }
        if (!is_chosen) {
            left[count++] = w;
        }
    }
    return count;
}

static void
take_out(int64_t *left, ptrdiff_t count, ptrdiff_t place)
{
    memmove(left + place, left + place + 1, (size_t)(count - place - 1) * sizeof(*left));
}

void
add_rows(double *load_E, const double *window_WE, ptrdiff_t experts, const int64_t *rows, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++) {
        add_to(load_E, window_WE + rows[i] * experts, experts);
    }
}

void
measure(const double *load_E, ptrdiff_t experts, double *sum, double *squares)
{
    *sum = total(load_E, experts);
    *squares = dot(load_E, load_E, experts);
}

/* ---- greedy ------------------------------------------------------------------------------------------------ */

void
choose_greedily(const double *window_WE, ptrdiff_t window, ptrdiff_t experts, const Objective *objective,
                const double *draws, ptrdiff_t sample, double *load_E, double *terms_W2, int64_t *left,
                int64_t *chosen, ptrdiff_t have, ptrdiff_t take)
{
    double sum = total(load_E, experts);
    add_rows(load_E, window_WE, experts, chosen, have);
    for (ptrdiff_t c = 0; c < have; c++) {
        sum += total(window_WE + chosen[c] * experts, experts);
    }
    if (have == take) {
        return;
    }
    /* Of each candidate what does not depend on the load so far, and its sum. */
    for (ptrdiff_t w = 0; w < window; w++) {
        const double *row_E = window_WE + w * experts;
        double own = total(row_E, experts);
        double square = objective->square == 0 ? 0 : objective->square * dot(row_E, row_E, experts);
        terms_W2[2 * w] = square - 2 * objective->level * own - objective->variance * own * own / (double)experts;
        terms_W2[2 * w + 1] = own;
    }
    ptrdiff_t count = list_left(left, window, chosen, have);
    for (; have < take; have++) {
        ptrdiff_t looked = count;
        if (draws != NULL && sample < count) {
            looked = sample;
            for (ptrdiff_t i = 0; i < looked; i++) {
                ptrdiff_t other = i + (ptrdiff_t)(*draws++ * (double)(count - i));
                int64_t swapped = left[i];
                left[i] = left[other];
                left[other] = swapped;
            }
        }
        double pull = 2 * objective->variance * sum / (double)experts, least = 0;
        ptrdiff_t best = 0;
        for (ptrdiff_t i = 0; i < looked; i++) {
            const double *terms = terms_W2 + 2 * left[i];
            double score = 2 * dot(load_E, window_WE + left[i] * experts, experts) + terms[0] - pull * terms[1];
            if (i == 0 || score < least || (score == least && left[i] < left[best])) {
                least = score;
                best = i;
            }
        }
        chosen[have] = left[best];
        add_to(load_E, window_WE + left[best] * experts, experts);
        sum += terms_W2[2 * left[best] + 1];
        take_out(left, count--, best);
    }
}

/* ---- least peak ---------------------------------------------------------------------------------------------- */

static double
largest(const double *row_E, ptrdiff_t experts)
{
    double most = row_E[0];
    for (ptrdiff_t e = 1; e < experts; e++) {
        most = row_E[e] > most ? row_E[e] : most;
    }
    return most;
}

/* Four side by side, as in `dot`. */
static double
largest_sum(const double *row_E, const double *load_E, ptrdiff_t experts)
{
    double most[4];
    for (ptrdiff_t lane = 0; lane < 4; lane++) {
        most[lane] = row_E[0] + load_E[0];
    }
    ptrdiff_t e = 0;
    for (; e + 4 <= experts; e += 4) {
        for (ptrdiff_t lane = 0; lane < 4; lane++) {
            double here = row_E[e + lane] + load_E[e + lane];
            most[lane] = here > most[lane] ? here : most[lane];
        }
    }
    for (; e < experts; e++) {
        double here = row_E[e] + load_E[e];
        most[0] = here > most[0] ? here : most[0];
    }
    return largest(most, 4);
}

void
choose_least_peak(const double *window_WE, ptrdiff_t window, ptrdiff_t experts, double *load_E, double *peak_W,
                  int64_t *left, int64_t *chosen, ptrdiff_t have, ptrdiff_t take)
{
    for (ptrdiff_t w = 0; w < window; w++) {
        peak_W[w] = largest(window_WE + w * experts, experts);
    }
    add_rows(load_E, window_WE, experts, chosen, have);
    ptrdiff_t count = list_left(left, window, chosen, have);
    for (; have < take; have++) {
        double least = 0;
        ptrdiff_t best = 0;
        for (ptrdiff_t i = 0; i < count; i++) {
            double peak = largest_sum(window_WE + left[i] * experts, load_E, experts);
            if (i == 0 || peak < least || (peak == least && peak_W[left[i]] > peak_W[left[best]])) {
                least = peak;
                best = i;
            }
        }
        chosen[have] = left[best];
        add_to(load_E, window_WE + left[best] * experts, experts);
        take_out(left, count--, best);
    }
}

/* ---- by the time of the expert servers --------------------------------------------------------------------- */

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

/* Of each layer the largest time of a server plus the mean of all: the largest alone says nothing of what is added
 * elsewhere. */
static double
worth(const Servers *servers, const float *pairs_S, const float *idle_R, const float *more_pairs_S,
      const float *more_idle_R)
{
    ptrdiff_t of_layer = servers->servers / servers->layers;
    double largest = 0, all_largest = 0, sum = 0;
    for (ptrdiff_t s = 0; s < servers->servers; s++) {
        if (s % of_layer == 0) {
            all_largest += largest;
            largest = 0;
        }
        int64_t first = servers->first_S[s], count = servers->first_S[s + 1] - first;
        double active = (double)count - (double)dot_of_floats(idle_R + first, more_idle_R + first, count);
        double weights_s = servers->load_s * active;
        double compute_s = servers->pair_s * (double)(pairs_S[s] + more_pairs_S[s]);
        double time_s = weights_s > compute_s ? weights_s : compute_s;
        largest = time_s > largest ? time_s : largest;
        sum += time_s;
    }
    return all_largest + largest + sum / (double)of_layer;
}

static void
add_folded(const Servers *servers, float *pairs_S, float *idle_R, const float *more_pairs_S, const float *more_idle_R)
{
    for (ptrdiff_t s = 0; s < servers->servers; s++) {
        pairs_S[s] += more_pairs_S[s];
    }
    for (ptrdiff_t r = 0; r < servers->replicas; r++) {
        idle_R[r] *= more_idle_R[r];
    }
}

void
choose_for_servers(const double *window_WE, ptrdiff_t window, ptrdiff_t experts, const Servers *servers,
                   const double *load_E, float *scratch, int64_t *left, int64_t *chosen, ptrdiff_t have, ptrdiff_t take)
{
    ptrdiff_t replicas = servers->replicas, many = servers->servers;
    float *idle_WR = scratch, *idle_R = idle_WR + window * replicas, *pairs_WS = idle_R + replicas;
    float *pairs_S = pairs_WS + window * many;
    if (have == take) {
        return;
    }
    for (ptrdiff_t w = 0; w < window; w++) {
        fold(servers, window_WE + w * experts, pairs_WS + w * many, idle_WR + w * replicas);
    }
    fold(servers, load_E, pairs_S, idle_R);
    for (ptrdiff_t c = 0; c < have; c++) {
        add_folded(servers, pairs_S, idle_R, pairs_WS + chosen[c] * many, idle_WR + chosen[c] * replicas);
    }
    ptrdiff_t count = list_left(left, window, chosen, have);
    for (; have < take; have++) {
        double least = 0;
        ptrdiff_t best = 0;
        for (ptrdiff_t i = 0; i < count; i++) {
            double score = worth(servers, pairs_S, idle_R, pairs_WS + left[i] * many, idle_WR + left[i] * replicas);
            if (i == 0 || score < least) {
                least = score;
                best = i;
            }
        }
        chosen[have] = left[best];
        add_folded(servers, pairs_S, idle_R, pairs_WS + left[best] * many, idle_WR + left[best] * replicas);
        take_out(left, count--, best);
    }
}

double
step_time(const Servers *servers, const double *load_E)
{
    ptrdiff_t of_layer = servers->servers / servers->layers;
    double largest = 0, all_largest = 0;
    for (ptrdiff_t s = 0; s < servers->servers; s++) {
        if (s % of_layer == 0) {
            all_largest += largest;
            largest = 0;
        }
        double pairs = 0, active = 0;
        for (int64_t r = servers->first_S[s]; r < servers->first_S[s + 1]; r++) {
            double here = servers->share_R[r] * load_E[servers->expert_R[r]];
            pairs += here;
            active += 1.0 - (double)decay((float)here);
        }
        double weights_s = servers->load_s * active, compute_s = servers->pair_s * pairs;
        double time_s = weights_s > compute_s ? weights_s : compute_s;
        largest = time_s > largest ? time_s : largest;
    }
    return all_largest + largest;
}

/* ---- differencing -------------------------------------------------------------------------------------------- */

/* Sorts indices by falling key; of equals the lower index is first. Insertion: there are few. */
static void
sort_falling(int64_t *indices, ptrdiff_t count, const double *key)
{
    for (ptrdiff_t i = 1; i < count; i++) {
        int64_t moved = indices[i];
        ptrdiff_t place = i;
        while (place > 0 && (key[indices[place - 1]] < key[moved] ||
                             (key[indices[place - 1]] == key[moved] && indices[place - 1] > moved))) {
            indices[place] = indices[place - 1];
            place--;
        }
        indices[place] = moved;
    }
}

/* How much the groups of a partial split differ: the sum over experts of largest less least. */
static double
difference(const double *split_GE, ptrdiff_t groups, ptrdiff_t experts)
{
    double sum = 0;
    for (ptrdiff_t e = 0; e < experts; e++) {
        double most = split_GE[e], least = split_GE[e];
        for (ptrdiff_t g = 1; g < groups; g++) {
            double here = split_GE[g * experts + e];
            most = here > most ? here : most;
            least = here < least ? here : least;
        }
        sum += most - least;
    }
    return sum;
}

void
split_by_difference(const double *window_WE, ptrdiff_t window, ptrdiff_t experts, ptrdiff_t groups, double *scratch,
                    int64_t *indices, int64_t *group_W)
{
    ptrdiff_t splits = window / groups, row = groups * experts;
    double *sums_PGE = scratch, *key_W = sums_PGE + window * experts, *size_G = key_W + window;
    /* member_W: the row of sums_PGE that a request is in, its split times the groups plus its group. */
    int64_t *order_W = indices, *member_W = order_W + window, *by_size = member_W + window, *taken = by_size + window;
    for (ptrdiff_t w = 0; w < window; w++) {
        order_W[w] = w;
        key_W[w] = dot(window_WE + w * experts, window_WE + w * experts, experts);
    }
    sort_falling(order_W, window, key_W);
    for (ptrdiff_t place = 0; place < window; place++) {
        memcpy(sums_PGE + place * experts, window_WE + order_W[place] * experts, (size_t)experts * sizeof(double));
        member_W[order_W[place]] = place;
    }
    for (ptrdiff_t p = 0; p < splits; p++) {
        key_W[p] = difference(sums_PGE + p * row, groups, experts);
    }
    for (ptrdiff_t count = splits; count > 1; count--) {
        /* The two that differ most: a is to stay, b to be joined to it. */
        ptrdiff_t a = 0, b = 1;
        if (key_W[b] > key_W[a]) {
            a = 1;
            b = 0;
        }
        for (ptrdiff_t p = 2; p < count; p++) {
            if (key_W[p] > key_W[a]) {
                b = a;
                a = p;
            } else if (key_W[p] > key_W[b]) {
                b = p;
            }
        }
        if (a > b) { /* so that the one that stays is never the last */
            ptrdiff_t swapped = a;
            a = b;
            b = swapped;
        }
        double *sums_a = sums_PGE + a * row, *sums_b = sums_PGE + b * row;
        /* The largest group of a first; each takes of b's the one that meets it least. */
        for (ptrdiff_t g = 0; g < groups; g++) {
            by_size[g] = g;
            taken[g] = -1;
            size_G[g] = dot(sums_a + g * experts, sums_a + g * experts, experts);
        }
        sort_falling(by_size, groups, size_G);
        for (ptrdiff_t i = 0; i < groups; i++) {
            ptrdiff_t best = -1;
            double least = 0;
            for (ptrdiff_t g = 0; g < groups; g++) {
                double meets = taken[g] >= 0 ? 0 : dot(sums_a + by_size[i] * experts, sums_b + g * experts, experts);
                if (taken[g] < 0 && (best < 0 || meets < least)) {
                    best = g;
                    least = meets;
                }
            }
            taken[best] = by_size[i];
        }
        for (ptrdiff_t g = 0; g < groups; g++) {
            add_to(sums_a + taken[g] * experts, sums_b + g * experts, experts);
        }
        key_W[a] = difference(sums_a, groups, experts);
        /* Those of b are members of a now; the last split moves into b's place. */
        ptrdiff_t last = count - 1;
        for (ptrdiff_t w = 0; w < window; w++) {
            ptrdiff_t split = member_W[w] / groups, group = member_W[w] % groups;
            if (split == b) {
                member_W[w] = a * groups + taken[group];
            } else if (split == last) {
                member_W[w] = b * groups + group;
            }
        }
        if (b != last) {
            memcpy(sums_b, sums_PGE + last * row, (size_t)row * sizeof(double));
            key_W[b] = key_W[last];
        }
    }
    for (ptrdiff_t w = 0; w < window; w++) {
        group_W[w] = member_W[w] % groups;
    }
}
