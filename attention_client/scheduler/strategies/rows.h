/* Sums over rows of a window, and the list of rows left to choose from. */
#ifndef EAAS_SCHEDULER_ROWS_H
#define EAAS_SCHEDULER_ROWS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Four parallel sums: the compiler may not reorder a single sum of doubles. */
static inline double
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

static inline double
total(const double *a, ptrdiff_t n)
{
    double sum = 0;
    for (ptrdiff_t i = 0; i < n; i++) {
        sum += a[i];
    }
    return sum;
}

static inline void
add_to(double *load_E, const double *row_E, ptrdiff_t experts)
{
    for (ptrdiff_t e = 0; e < experts; e++) {
        load_E[e] += row_E[e];
    }
}

/* The indices not chosen yet, ascending, so that the oldest of equals wins. */
static inline ptrdiff_t
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

static inline void
take_out(int64_t *left, ptrdiff_t count, ptrdiff_t place)
{
    memmove(left + place, left + place + 1, (size_t)(count - place - 1) * sizeof(*left));
}

#endif
