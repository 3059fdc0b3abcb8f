/* Products on AVX2, and the choice of tiles.
 *
 * The matrix stays as it is stored: one row of it after the other, in bfloat16, and no second copy. A tile of the result is
 * some rows times four channels; each of its sums is a vector that runs along the inputs:
 *
 *     matrix   i0 i1 i2 i3 .. i15   one vector of 16 bfloat16
 *              i0 i2 .. i14         << 16: the even ones, as float32
 *              i1 i3 .. i15         & 0xffff0000: the odd ones
 *     rows     i0 i2 .. i14 i1 i3 .. i15   float32, put into this order before
 *
 * A matrix that is read once (few rows) is read at memory's speed. For many rows, a block of rows stays in the L2 cache while
 * a strip of the matrix passes.
 */
#include "product.h"

#include <stdlib.h>
#include <string.h>

#ifdef __x86_64__
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define STEP (2 * LANES) /* Inputs of one vector of the matrix. */
#define ROWS 3           /* Of a tile: with its channels, as many sums as the registers hold. */
#define CHANNELS 4
#define BLOCK_BYTES (128 << 10) /* Of the rows that stay in the L2 cache. */
#define BAND_BYTES (4 << 20)    /* Of the rows that are converted at a time. */
#define STRIP 32                /* Channels of one task. */
#define LEAST_SHARED (1 << 21)  /* Multiplications that take 50 to 100 us alone: waking a thread costs 5, or 200. */

bool can_multiply(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

TARGET INLINE __m256 half_of(__m256i line, const int half) {
    return _mm256_castsi256_ps(half == 0 ? _mm256_slli_epi32(line, 16)
                                         : _mm256_and_si256(line, _mm256_set1_epi32((int)0xffff0000)));
}

/* The sums of four vectors. */
TARGET INLINE __m128 sums_of(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 halves = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

/* Rounded to nearest even; what is no number stays none. */
TARGET INLINE void store_bfloat16(__m128 values, uint16_t *out, int count) {
    const __m128i bits = _mm_castps_si128(values);
    const __m128i odd = _mm_and_si128(_mm_srli_epi32(bits, 16), _mm_set1_epi32(1));
    const __m128i up = _mm_srli_epi32(_mm_add_epi32(_mm_add_epi32(bits, odd), _mm_set1_epi32(0x7fff)), 16);
    const __m128i nan = _mm_castps_si128(_mm_cmpunord_ps(values, values));
    const __m128i words = _mm_blendv_epi8(up, _mm_set1_epi32(0x7fc0), nan);
    const uint64_t four = (uint64_t)_mm_cvtsi128_si64(_mm_packus_epi32(words, words));
    memcpy(out, &four, (size_t)count * sizeof *out);
}

TARGET INLINE __m128 load_bias(const uint16_t *bias, int count) {
    uint64_t four = 0;
    memcpy(&four, bias, (size_t)count * sizeof *bias);
    return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(_mm_cvtsi64_si128((long long)four)), 16));
}

TARGET INLINE void step(const int rows, const float *x, ptrdiff_t x_row, const __m256i *lines,
                        __m256 sums[ROWS][CHANNELS]) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        __m256 xs[ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) xs[r] = _mm256_loadu_ps(x + r * x_row + half * LANES);
#pragma GCC unroll 8
        for (int c = 0; c < CHANNELS; c++) {
            const __m256 w = half_of(lines[c], half);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) sums[r][c] = _mm256_fmadd_ps(xs[r], w, sums[r][c]);
        }
    }
}

/* Computes `rows` times `count` (at most four) results. x: float32 in the order of above, zeros up to a whole step. */
TARGET INLINE void tile(const Product *p, const int rows, const float *x, ptrdiff_t x_row, ptrdiff_t row,
                        ptrdiff_t channel, int count) {
    const uint16_t *w[CHANNELS];
    __m256 sums[ROWS][CHANNELS];
#pragma GCC unroll 8
    for (int c = 0; c < CHANNELS; c++) {
        w[c] = p->w + (channel + (c < count ? c : count - 1)) * p->w_row;
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) sums[r][c] = _mm256_setzero_ps();
    }
    const ptrdiff_t ahead = CHANNELS * p->w_row;
    ptrdiff_t i = 0;
    for (; i + STEP <= p->inputs; i += STEP) {
        __m256i lines[CHANNELS];
#pragma GCC unroll 8
        for (int c = 0; c < CHANNELS; c++) {
            lines[c] = _mm256_loadu_si256((const __m256i *)(w[c] + i));
            if (rows < ROWS) __builtin_prefetch(w[c] + i + ahead);
        }
        step(rows, x + i, x_row, lines, sums);
    }
    if (i < p->inputs) {
        __m256i lines[CHANNELS];
        for (int c = 0; c < CHANNELS; c++) {
            lines[c] = _mm256_setzero_si256();
            memcpy(&lines[c], w[c] + i, (size_t)(p->inputs - i) * sizeof *p->w);
        }
        step(rows, x + i, x_row, lines, sums);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        __m128 sum = sums_of(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
        if (p->bias != NULL) sum = _mm_add_ps(sum, load_bias(p->bias + channel, count));
        store_bfloat16(sum, p->out + (row + r) * p->channels + channel, count);
    }
}

/* Rows `first` to `first + count` of x, converted, one after the other. */
typedef struct {
    const Product *product;
    float *x;
    ptrdiff_t x_row, first, count, block;
} Band;

TARGET static void convert(const Band *band) {
    const Product *p = band->product;
    for (ptrdiff_t row = 0; row < band->count; row++) {
        const uint16_t *from = p->x + (band->first + row) * p->inputs;
        float *to = band->x + row * band->x_row;
        for (ptrdiff_t i = 0; i < p->inputs; i += STEP) {
            __m256i line = _mm256_setzero_si256();
            const ptrdiff_t left = p->inputs - i;
            if (left >= STEP)
                line = _mm256_loadu_si256((const __m256i *)(from + i));
            else
                memcpy(&line, from + i, (size_t)left * sizeof *from);
            _mm256_storeu_ps(to + i, half_of(line, 0));
            _mm256_storeu_ps(to + i + LANES, half_of(line, 1));
        }
    }
}

TARGET static void multiply_strip(void *context, int task, int thread) {
    (void)thread;
    const Band *band = context;
    const Product *p = band->product;
    const ptrdiff_t begin = (ptrdiff_t)task * STRIP, end = begin + STRIP < p->channels ? begin + STRIP : p->channels;
    for (ptrdiff_t from = 0; from < band->count; from += band->block) {
        const ptrdiff_t to = from + band->block < band->count ? from + band->block : band->count;
        for (ptrdiff_t channel = begin; channel < end; channel += CHANNELS) {
            const int count = end - channel < CHANNELS ? (int)(end - channel) : CHANNELS;
            for (ptrdiff_t row = from; row < to; row += ROWS) {
                const float *x = band->x + row * band->x_row;
                switch (to - row) {
                case 1: tile(p, 1, x, band->x_row, band->first + row, channel, count); break;
                case 2: tile(p, 2, x, band->x_row, band->first + row, channel, count); break;
                default: tile(p, ROWS, x, band->x_row, band->first + row, channel, count);
                }
            }
        }
    }
}

/* Rows of so many bytes: whole tiles, at least one. */
static ptrdiff_t rows_of(size_t bytes, ptrdiff_t x_row) {
    const ptrdiff_t rows = (ptrdiff_t)(bytes / sizeof(float)) / x_row / ROWS * ROWS;
    return rows > ROWS ? rows : ROWS;
}

bool multiply(const Product *product, Pool *pool) {
    const ptrdiff_t x_row = (product->inputs + STEP - 1) / STEP * STEP;
    if (product->rows == 0) return true;
    if (has_tiles()) return multiply_in_tiles(product, pool);
    const ptrdiff_t most = rows_of(BAND_BYTES, x_row), rows = product->rows < most ? product->rows : most;
    float *x = aligned_alloc(64, (size_t)(rows * x_row) * sizeof *x / 64 * 64 + 64);
    if (x == NULL) return false;
    const int strips = (int)((product->channels + STRIP - 1) / STRIP);
    for (ptrdiff_t first = 0; first < product->rows; first += rows) {
        Band band = {product, x, x_row, first, rows, rows_of(BLOCK_BYTES, x_row)};
        if (product->rows - first < rows) band.count = product->rows - first;
        convert(&band);
        if (product->channels * x_row * band.count >= LEAST_SHARED)
            pool_run(pool, multiply_strip, &band, strips);
        else
            for (int strip = 0; strip < strips; strip++) multiply_strip(&band, strip, 0);
    }
    free(x);
    return true;
}
#else
bool can_multiply(void) { return false; }
bool multiply(const Product *product, Pool *pool) {
    (void)product, (void)pool;
    return false;
}
#endif
