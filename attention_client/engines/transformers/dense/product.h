/* Products of bfloat16 rows with a bfloat16 matrix, for processors with AVX2 only and those with tiles. */
#ifndef EAAS_PRODUCT_H
#define EAAS_PRODUCT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../../../../eaas/threads/pool.h"

/* out (rows x channels) = x (rows x inputs) times the transpose of w (channels x inputs), plus bias; bfloat16. x and out are
 * contiguous; w has a row every `w_row` values. There is at least one input. */
typedef struct {
    const uint16_t *x, *w, *bias; /* bias: or NULL */
    uint16_t *out;
    ptrdiff_t rows, channels, inputs, w_row;
} Product;

/* Whether this processor has what `multiply` needs. */
bool can_multiply(void);

/* Sums are float32 and rounded once. A row's result does not depend on the rows beside it, nor on the threads.
 * False: there is no memory. */
bool multiply(const Product *product, Pool *pool);

/* The same in tiles of AMX, where this processor has them. */
bool has_tiles(void);
bool multiply_in_tiles(const Product *product, Pool *pool);

#endif
