/* Choices by the experts' loads alone: see select.h. */
#include "rows.h"
#include "select.h"

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
    /* For each candidate: the terms that do not depend on the load so far, and its sum. */
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

/* Four parallel lanes, as in `dot`. */
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
