/* The sum of a layer call's answers. The read dominates, since cache lines come from the core that wrote them: so the
 * sum goes token by token in one pass, and stays in the L1 cache. */
#ifndef EAAS_DISPATCH_SUM_H
#define EAAS_DISPATCH_SUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../../eaas/wire/mutant.h"

/* An answer. */
typedef struct {
    const int64_t *row_R;  /* its tokens, ascending */
    const float *part_RH;
    ptrdiff_t rows;
    ptrdiff_t next; /* row that has not been added yet */
} Addend;

/* Sum token `t` into `out` in the order of the answers; tokens are asked for in ascending order. False: none has it, and
 * `out` is as it was. */
static inline bool
sum_token(float *out, ptrdiff_t t, ptrdiff_t hidden, Addend *addends, ptrdiff_t count)
{
    bool covered = false;
    for (ptrdiff_t i = 0; i < count; i++) {
        Addend *addend = &addends[MUTANT(19) ? count - 1 - i : i];
        if (addend->next == addend->rows || addend->row_R[addend->next] != t) {
            continue;
        }
        const float *row = addend->part_RH + addend->next++ * hidden;
        if (covered) {
            for (ptrdiff_t h = 0; h < hidden; h++) {
                out[h] += row[h];
            }
        } else {
            for (ptrdiff_t h = 0; h < hidden; h++) {
                /* As in a sum that begins with zero: the sign of a zero must not depend on the parts. */
                out[h] = 0.0f + row[h];
            }
            covered = true;
        }
    }
    return covered;
}

#endif
