/* Differencing: see select.h. */
#include "rows.h"
#include "select.h"

/* Sorts indices by falling key; of equals the lower index comes first. Insertion sort, since there are few. */
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

/* Difference of a partial split's groups: the sum over experts of largest minus least. */
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
    /* member_W: a request's row of sums_PGE: its split times `groups`, plus its group. */
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
        /* The two splits that differ most: b is joined to a. */
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
        if (a > b) { /* a must not be the last */
            ptrdiff_t swapped = a;
            a = b;
            b = swapped;
        }
        double *sums_a = sums_PGE + a * row, *sums_b = sums_PGE + b * row;
        /* Largest group of a first; each takes b's group with the smallest dot product. */
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
        /* Members of b belong to a now; the last split moves into b's place. */
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
