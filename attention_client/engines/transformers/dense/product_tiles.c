/* Products in tiles of Intel AMX.
 *
 * The matrix stays as it is stored: 16 of its rows by 32 inputs are a tile of a as they are. Tiles of b have 16 rows of x,
 * with pairs of inputs in a word: x is transposed once, in words.
 *
 *     sums[channel][row] += w[channel][input] * x[input][row]
 *
 * The sums of a tile go through all inputs in their order, so a row's result does not depend on the rows beside it.
 */
#include "product.h"

#ifdef __x86_64__
#include "../../../../eaas/threads/amx.h"

#include <stdlib.h>

#define TARGET __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512bf16")))
#define INLINE TARGET static inline __attribute__((always_inline))
#define SIDE 16  /* Rows of a tile, and words of a row. */
#define PAIR 32  /* Channels or rows of two tiles. */
#define DEPTH 32 /* Inputs of a tile. */
#define LINE_BYTES 64
#define TILE_BYTES 1024
#define STRIP 128              /* Channels of one task. */
#define BLOCK_BYTES (1 << 20)  /* Of the tiles of x that stay in the L2 cache beside a strip. */
#define LEAST_SHARED (1 << 20) /* Values of the matrix that one thread reads in 100 us. */

typedef char Tile[TILE_BYTES];

/* Tiles of some rows of x: `steps` for each 16 rows. */
typedef struct {
    const Product *product;
    Tile *x;
    char *copies; /* for each thread, of a strip of the matrix; NULL: it is read as it is */
    ptrdiff_t first, count, steps;
} Block;

bool has_tiles(void) { return bfloat16_tiles_work(); }

static ptrdiff_t least(ptrdiff_t a, ptrdiff_t b) { return a < b ? a : b; }

/* Read 32 values from `at` on, those beyond `size` as 0. */
INLINE __m512i read_values(const uint16_t *row, ptrdiff_t at, ptrdiff_t size) {
    const ptrdiff_t left = size - at;
    return _mm512_maskz_loadu_epi16(left >= DEPTH ? 0xffffffffu : (1u << left) - 1, row + at);
}

/* Transpose 16 rows of a block to its tiles. */
TARGET static void transpose_rows(void *context, int task, int thread) {
    (void)thread;
    const Block *block = context;
    const Product *p = block->product;
    const ptrdiff_t row = (ptrdiff_t)task * SIDE;
    for (ptrdiff_t step = 0; step < block->steps; step++) {
        __m512i words[SIDE];
        for (ptrdiff_t r = 0; r < SIDE; r++) {
            words[r] = row + r < block->count
                           ? read_values(p->x + (block->first + row + r) * p->inputs, step * DEPTH, p->inputs)
                           : _mm512_setzero_si512();
        }
        transpose_words(words);
        memcpy(block->x[task * block->steps + step], words, sizeof words);
    }
}

/* Sums of 16 channels and 16 rows, to bfloat16. */
INLINE void store_sums(const Block *block, const float *sums, ptrdiff_t row, ptrdiff_t channel) {
    const Product *p = block->product;
    const ptrdiff_t channels = least(p->channels - channel, SIDE), rows = least(block->count - row, SIDE);
    const __mmask16 there = (__mmask16)((1u << channels) - 1);
    __m512 bias = _mm512_setzero_ps();
    if (p->bias != NULL) {
        const __m256i words = _mm256_maskz_loadu_epi16(there, p->bias + channel);
        bias = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
    }
    __m512i values[SIDE];
    for (int i = 0; i < SIDE; i++) values[i] = _mm512_load_si512(sums + i * SIDE);
    transpose_words(values);
    uint16_t *out = p->out + (block->first + row) * p->channels + channel;
    for (ptrdiff_t r = 0; r < rows; r++) {
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(_mm512_add_ps(_mm512_castsi512_ps(values[r]), bias));
        _mm256_mask_storeu_epi16(out + r * p->channels, there, rounded);
    }
}

/* Sum 1 or 2 times 16 channels by 1 or 2 times 16 rows; constants where this is inlined. Rows of a are `a_row` bytes apart
 * and its tiles `a_step`; it is read `ahead` bytes ahead, unless that is 0. */
INLINE void sum_tiles(const int tall, const int wide, const char *a, ptrdiff_t a_row, ptrdiff_t a_step, ptrdiff_t ahead,
                      const Tile *b, ptrdiff_t steps, float sums[2][2][SIDE * SIDE]) {
    /* Tile numbers must be literals. */
    _tile_zero(0);
    if (tall > 1) _tile_zero(1);
    if (wide > 1) _tile_zero(2);
    if (tall > 1 && wide > 1) _tile_zero(3);
    for (ptrdiff_t step = 0; step < steps; step++, a += a_step) {
        for (int r = 0; ahead > 0 && r < tall * SIDE; r++) _mm_prefetch(a + r * a_row + ahead, _MM_HINT_T1);
        _tile_loadd(4, a, a_row);
        _tile_loadd(6, b[step], LINE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        if (tall > 1) {
            _tile_loadd(5, a + SIDE * a_row, a_row);
            _tile_dpbf16ps(1, 5, 6);
        }
        if (wide > 1) {
            _tile_loadd(7, b[steps + step], LINE_BYTES);
            _tile_dpbf16ps(2, 4, 7);
        }
        if (tall > 1 && wide > 1) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums[0][0], LINE_BYTES);
    if (tall > 1) _tile_stored(1, sums[0][1], LINE_BYTES);
    if (wide > 1) _tile_stored(2, sums[1][0], LINE_BYTES);
    if (tall > 1 && wide > 1) _tile_stored(3, sums[1][1], LINE_BYTES);
}

/* Copy a strip's channels, with zeros around them up to whole tiles: 32 channels after the other, each step of theirs. */
TARGET static void copy_strip(const Product *p, ptrdiff_t begin, ptrdiff_t end, ptrdiff_t steps, char *to) {
    for (ptrdiff_t channel = begin; channel < (end + SIDE - 1) / SIDE * SIDE; channel++) {
        for (ptrdiff_t step = 0; step < steps; step++) {
            const __m512i line = channel < end ? read_values(p->w + channel * p->w_row, step * DEPTH, p->inputs)
                                               : _mm512_setzero_si512();
            const ptrdiff_t line_of_pair = ((channel - begin) / PAIR * steps + step) * PAIR + (channel - begin) % PAIR;
            _mm512_store_si512(to + line_of_pair * LINE_BYTES, line);
        }
    }
}

TARGET static void multiply_strip(void *context, int task, int thread) {
    static const uint8_t rows[8] = {16, 16, 16, 16, 16, 16, 16, 16}, bytes[8] = {64, 64, 64, 64, 64, 64, 64, 64};
    const Block *block = context;
    const Product *p = block->product;
    const ptrdiff_t begin = (ptrdiff_t)task * STRIP, end = least(begin + STRIP, p->channels), steps = block->steps;
    const char *a = (const char *)(p->w + begin * p->w_row);
    ptrdiff_t a_row = p->w_row * (ptrdiff_t)sizeof *p->w, a_step = LINE_BYTES;
    if (block->copies != NULL) {
        char *copy = block->copies + thread * STRIP * steps * LINE_BYTES;
        copy_strip(p, begin, end, steps, copy);
        a = copy, a_row = LINE_BYTES, a_step = PAIR * LINE_BYTES;
    }
    amx_configure(rows, bytes);
    for (ptrdiff_t row = 0; row < block->count; row += PAIR) {
        const Tile *b = block->x + row / SIDE * steps;
        const int wide = block->count - row > SIDE ? 2 : 1;
        for (ptrdiff_t channel = begin; channel < end; channel += PAIR) {
            const int tall = end - channel > SIDE ? 2 : 1;
            const char *at = a + (channel - begin) * (block->copies != NULL ? steps * LINE_BYTES : a_row);
            const ptrdiff_t ahead = block->copies == NULL && row == 0 && channel + 2 * PAIR <= end ? PAIR * a_row : 0;
            float sums[2][2][SIDE * SIDE] __attribute__((aligned(64)));
            if (tall == 2 && wide == 2)
                sum_tiles(2, 2, at, a_row, a_step, ahead, b, steps, sums);
            else if (tall == 2)
                sum_tiles(2, 1, at, a_row, a_step, ahead, b, steps, sums);
            else if (wide == 2)
                sum_tiles(1, 2, at, a_row, a_step, ahead, b, steps, sums);
            else
                sum_tiles(1, 1, at, a_row, a_step, ahead, b, steps, sums);
            for (int n = 0; n < wide; n++) {
                for (int m = 0; m < tall; m++) store_sums(block, sums[n][m], row + n * SIDE, channel + m * SIDE);
            }
        }
    }
    /* Others use tiles in these threads, too; and for a sleeping thread with live tiles, Linux saves 8 KiB. */
    _tile_release();
}

/* Do tasks with a pool's threads, or alone. */
static void share(Pool *pool, Task *task, Block *block, int tasks) {
    if (pool != NULL) {
        pool_run(pool, task, block, tasks);
        return;
    }
    for (int i = 0; i < tasks; i++) task(block, i, 0);
}

bool multiply_in_tiles(const Product *p, Pool *pool) {
    const ptrdiff_t steps = (p->inputs + DEPTH - 1) / DEPTH, most = BLOCK_BYTES / TILE_BYTES / steps * SIDE;
    const ptrdiff_t rows = least((p->rows + SIDE - 1) / SIDE * SIDE, most < PAIR ? PAIR : most);
    /* Tiles at the edges would hold what is beyond the matrix. */
    const bool copy = p->channels % SIDE > 0 || p->inputs % DEPTH > 0;
    const ptrdiff_t x_bytes = rows / SIDE * steps * TILE_BYTES;
    const ptrdiff_t copy_bytes = copy ? pool_threads(pool) * STRIP * steps * LINE_BYTES : 0;
    char *memory = aligned_alloc(64, (size_t)(x_bytes + copy_bytes));
    if (memory == NULL) return false;
    const int strips = (int)((p->channels + STRIP - 1) / STRIP);
    for (ptrdiff_t first = 0; first < p->rows; first += rows) {
        Block block = {
            .product = p,
            .x = (Tile *)memory,
            .copies = copy ? memory + x_bytes : NULL,
            .first = first,
            .count = least(p->rows - first, rows),
            .steps = steps,
        };
        const int columns = (int)((block.count + SIDE - 1) / SIDE);
        /* The matrix is read once; 32 rows take as long again. */
        const bool is_large = p->channels * p->inputs * (1 + block.count / 32) >= LEAST_SHARED;
        share(is_large ? pool : NULL, transpose_rows, &block, columns);
        share(is_large ? pool : NULL, multiply_strip, &block, strips);
    }
    free(memory);
    return true;
}
#else
bool has_tiles(void) { return false; }
bool multiply_in_tiles(const Product *product, Pool *pool) {
    (void)product, (void)pool;
    return false;
}
#endif
