/* Sparse layouts (sparse.h) from others. */
#include <string.h>

#include "held.h"
#include "planning.h"
#include "sparse.h"

/* Turns the numbers in first[1 .. servers], of replicas by server, into the begins of their rows, from `at` on. */
static int64_t
begin_rows(int64_t *first, ptrdiff_t servers, int64_t at)
{
    for (ptrdiff_t s = 0; s < servers; s++) {
        int64_t count = first[s + 1];
        first[s + 1] = at;
        at += count;
    }
    return at;
}

/* From a compact placement, an expert's replicas with equal shares. */
EXPORT int
sparse_of_compact(const int64_t *count_LE, const int32_t *server, int64_t *first, int32_t *expert, double *share,
                  ptrdiff_t layers, ptrdiff_t experts, ptrdiff_t replicas, ptrdiff_t ends, ptrdiff_t size)
{
    if (ends < 1 || (layers > 0 && (ends - 1) % layers != 0)) {
        return OUT_OF_RANGE;
    }
    ptrdiff_t servers = layers > 0 ? (ends - 1) / layers : 0, placed = 0;
    if (!counts_fit(count_LE, layers, experts, replicas) || !servers_fit(server, layers * replicas, servers)) {
        return OUT_OF_RANGE;
    }
    memset(first, 0, (size_t)ends * sizeof(*first));
    for (ptrdiff_t l = 0; l < layers; l++) {
        int64_t total = 0;
        for (ptrdiff_t e = 0; e < experts; e++) {
            total += count_LE[l * experts + e];
        }
        for (int64_t i = 0; i < total; i++) {
            int32_t s = server[l * replicas + i];
            if (s >= 0) {
                first[l * servers + s + 1]++;
                placed++;
            }
        }
    }
    if (placed != size) {
        return OUT_OF_RANGE;
    }
    int64_t at = 0;
    for (ptrdiff_t l = 0; l < layers; l++) {
        const int64_t *count = count_LE + l * experts;
        const int32_t *next = server + l * replicas;
        int64_t *row = first + l * servers;
        at = begin_rows(row, servers, at);
        for (ptrdiff_t e = 0; e < experts; next += count[e], e++) {
            int64_t holders = 0;
            for (int64_t i = 0; i < count[e]; i++) {
                holders += next[i] >= 0;
            }
            for (int64_t i = 0; i < count[e]; i++) {
                if (next[i] >= 0) {
                    int64_t n = row[next[i] + 1]++;
                    expert[n] = (int32_t)e;
                    share[n] = 1.0 / (double)holders;
                }
            }
        }
    }
    return DONE;
}

/* From holds (L, S, E), with their shares, or (NULL) equal ones. */
EXPORT int
sparse_of_holds(const uint8_t *holds, const double *shares, int64_t *first, int32_t *expert, double *share,
                ptrdiff_t layers, ptrdiff_t servers, ptrdiff_t experts, ptrdiff_t ends, ptrdiff_t size)
{
    if (ends != layers * servers + 1) {
        return OUT_OF_RANGE;
    }
    int32_t *listed = malloc((size_t)experts * sizeof(*listed));
    int64_t *count = malloc((size_t)experts * sizeof(*count));
    bool fits = listed != NULL && count != NULL;
    int result = fits ? DONE : NO_MEMORY;
    int64_t at = 0;
    first[0] = 0;
    for (ptrdiff_t l = 0; result == DONE && l < layers; l++) {
        int64_t begin = at;
        memset(count, 0, (size_t)experts * sizeof(*count));
        for (ptrdiff_t s = 0; result == DONE && s < servers; s++) {
            ptrdiff_t row = l * servers + s;
            int32_t found = list_row(holds + row * experts, experts, listed);
            if (at + found > size) {
                result = OUT_OF_RANGE;
                break;
            }
            for (int32_t i = 0; i < found; i++, at++) {
                expert[at] = listed[i];
                count[listed[i]]++;
                if (shares != NULL) {
                    share[at] = shares[row * experts + listed[i]];
                }
            }
            first[row + 1] = at;
        }
        for (int64_t n = begin; shares == NULL && n < at; n++) {
            share[n] = 1.0 / (double)count[expert[n]];
        }
    }
    free(listed);
    free(count);
    return result == DONE && at != size ? OUT_OF_RANGE : result;
}

/* new_X: by row, the number of replicas of one layout (first, expert) that another one (before, held) lacks; the last
 * element is unused. */
EXPORT int
sparse_new(const int64_t *first, const int32_t *expert, const int64_t *before, const int32_t *held, int64_t *new_X,
           ptrdiff_t ends, ptrdiff_t size, ptrdiff_t held_size)
{
    if (!rows_fit(first, ends, expert, size, INT32_MAX) || !rows_fit(before, ends, held, held_size, INT32_MAX)) {
        return OUT_OF_RANGE;
    }
    for (ptrdiff_t row = 0; row + 1 < ends; row++) {
        int64_t found = 0, m = before[row];
        for (int64_t n = first[row]; n < first[row + 1]; n++) {
            while (m < before[row + 1] && held[m] < expert[n]) {
                m++;
            }
            found += m == before[row + 1] || held[m] != expert[n];
        }
        new_X[row] = found;
    }
    new_X[ends - 1] = 0;
    return DONE;
}
