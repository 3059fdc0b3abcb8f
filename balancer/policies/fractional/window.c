/* Means over parts of a window of loads, in one pass: a window of counts is the largest array that a plan reads. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../native/export.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx2", "default")))
#else
#define WIDE
#endif

/* For each part, first_P[p] .. first_P[p + 1] - 1, its mean in mean_LPE; for each block of `parts` / `blocks` parts, its
 * mean in block_NLE. */
#define DEFINE_MEANS(name, type)                                                                                       \
    WIDE static void add_##name(float *sum, const type *load, ptrdiff_t experts)                                       \
    {                                                                                                                  \
        for (ptrdiff_t e = 0; e < experts; e++) {                                                                      \
            sum[e] += (float)load[e];                                                                                  \
        }                                                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    EXPORT int window_means_##name(const type *load_WLE, const int64_t *first_X, float *mean_LPE, double *block_NLE,   \
                                   ptrdiff_t iterations, ptrdiff_t layers, ptrdiff_t experts, ptrdiff_t ends,          \
                                   ptrdiff_t parts, ptrdiff_t blocks)                                                  \
    {                                                                                                                  \
        if (!parts_fit(first_X, ends, parts, blocks, iterations)) {                                                    \
            return OUT_OF_RANGE;                                                                                       \
        }                                                                                                              \
        ptrdiff_t each = parts / blocks;                                                                               \
        memset(block_NLE, 0, (size_t)(blocks * layers * experts) * sizeof(*block_NLE));                                \
        for (ptrdiff_t p = 0; p < parts; p++) {                                                                        \
            for (ptrdiff_t l = 0; l < layers; l++) {                                                                   \
                float *sum = mean_LPE + (l * parts + p) * experts;                                                     \
                memset(sum, 0, (size_t)experts * sizeof(*sum));                                                        \
                for (int64_t w = first_X[p]; w < first_X[p + 1]; w++) {                                                \
                    add_##name(sum, load_WLE + (w * layers + l) * experts, experts);                                   \
                }                                                                                                      \
                settle(sum, block_NLE + (p / each * layers + l) * experts, experts, first_X[p + 1] - first_X[p],       \
                       first_X[(p / each + 1) * each] - first_X[p / each * each]);                                     \
            }                                                                                                          \
        }                                                                                                              \
        return DONE;                                                                                                   \
    }

static bool
parts_fit(const int64_t *first_X, ptrdiff_t ends, ptrdiff_t parts, ptrdiff_t blocks, ptrdiff_t iterations)
{
    if (blocks < 1 || parts < blocks || parts % blocks != 0 || ends != parts + 1 || first_X[0] < 0 ||
        first_X[parts] > iterations) {
        return false;
    }
    for (ptrdiff_t p = 0; p < parts; p++) {
        if (first_X[p + 1] <= first_X[p]) {
            return false;
        }
    }
    return true;
}

/* A part's sum becomes its mean, and counts for its block's. */
WIDE static void
settle(float *sum, double *block, ptrdiff_t experts, int64_t length, int64_t of_block)
{
    float each = 1 / (float)length;
    double part = 1 / (double)of_block;
    for (ptrdiff_t e = 0; e < experts; e++) {
        block[e] += sum[e] * part;
        sum[e] *= each;
    }
}

DEFINE_MEANS(uint8, uint8_t)
DEFINE_MEANS(uint16, uint16_t)
DEFINE_MEANS(uint32, uint32_t)
DEFINE_MEANS(int64, int64_t)
DEFINE_MEANS(float32, float)
DEFINE_MEANS(float64, double)
