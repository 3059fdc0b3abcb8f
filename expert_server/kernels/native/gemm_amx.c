/* Products of bfloat16 rows with Intel AMX: tiles of up to 16 rows of 64 bytes. Few rows: gemm_amx_few.c.
 *
 * With bfloat16 weights, sums stay in their tiles for all of k. Meanwhile what is read next comes into the second
 * cache, a few lines with each step: at some dozens of rows of an expert, memory and tiles take about as long.
 *
 * Narrow floats become bfloat16 lines, exactly: a section of two panels at a time, in memory that stays in the L1 cache
 * while all rows use it. With exponents (MXFP4) lines have their scales, powers of two. Else (FP8) they do not: the sum of
 * each segment begins at zero; then it is multiplied by its scales and added to the total.
 */
#include "native.h"

#ifdef __x86_64__
#include <string.h>

#include "../../../eaas/threads/amx.h"
#include "codes.h"

#define AMX __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vbmi")))
#define ROWS 16
#define STEP_K 32 /* Inputs of one tile of x. */
#define STEP_BYTES (STEP_K * 2)
#define TILE_BYTES (PANEL * STEP_BYTES) /* A tile of weights is contiguous in the panel. */
#define BLOCK_K 512 /* 32 rows of it are 32 KiB: they fit the L1 cache. */
#define WIDE_BYTES ((size_t)BLOCK_K * PANEL * 2)
/* Prefetch distance: the hardware prefetcher stops at each 4 KiB page. */
#define AHEAD_BYTES 8192

bool amx_works(void) { return can_decode_pairs() && CPU_HAS_TILES("amx-bf16"); }

/* Tiles 0-3 are sums, 4 and 5 rows of x (the upper and the lower ones), 6 and 7 weights. */
static void configure_rows(uint8_t upper, uint8_t lower) {
    amx_configure((const uint8_t[8]){upper, upper, lower, lower, upper, lower, ROWS, ROWS},
                  (const uint8_t[8]){LINE_BYTES, LINE_BYTES, LINE_BYTES, LINE_BYTES, LINE_BYTES, LINE_BYTES, LINE_BYTES,
                                     LINE_BYTES});
}

/* `rows`: of x, 1 to 32. With at most 16 rows all four sums are of the upper rows. */
static void configure(int rows) {
    const uint8_t upper = rows < ROWS ? rows : ROWS;
    configure_rows(upper, rows > ROWS ? rows - ROWS : upper);
}

/* A part of what a thread reads next, fetched into its second cache while a block is computed. */
typedef struct {
    const char *at, *end;
    int lines; /* With each step. */
} Stream;
#define STREAMS 2

/* Part `part` of `parts` of a region, for a block of so many steps. */
static Stream stream_of(Region region, int part, int parts, int steps) {
    const size_t lines = (region.bytes + LINE_BYTES - 1) / LINE_BYTES;
    const size_t begin = lines * (size_t)part / (size_t)parts, end = lines * ((size_t)part + 1) / (size_t)parts;
    const int each = ((int)(end - begin) + steps - 1) / steps;
    return (Stream){region.at + begin * LINE_BYTES, region.at + end * LINE_BYTES, each};
}

AMX INLINE void fetch_next(Stream *stream) {
    if (stream->at >= stream->end) return;
    for (int i = 0; i < stream->lines; i++, stream->at += LINE_BYTES) _mm_prefetch(stream->at, _MM_HINT_T1);
}

AMX static inline void fetch_tile(const char *at) {
    for (int line = 0; line < TILE_BYTES; line += LINE_BYTES) _mm_prefetch(at + line, _MM_HINT_T0);
}

/* Tile numbers must be literals, so these are macros. */
#define BEGIN(tile, at)                                                                                            \
    do {                                                                                                           \
        if (add)                                                                                                   \
            _tile_loadd(tile, at, ldc * sizeof(float));                                                            \
        else                                                                                                       \
            _tile_zero(tile);                                                                                      \
    } while (0)
#define END(tile, at) _tile_stored(tile, at, ldc * sizeof(float))
#define WEIGHTS(tile, p) _tile_loadd(tile, w + (p) * panel_bytes + (size_t)step * TILE_BYTES, LINE_BYTES)
#define FETCH(p) fetch_tile(w + (p) * panel_bytes + (size_t)step * TILE_BYTES + AHEAD_BYTES)

/* Up to 16 rows by `panels` (1 to 4, a constant where this is inlined). */
AMX INLINE void narrow(const int panels, const char *x, size_t x_stride, const char *w, size_t panel_bytes, int k,
                       float *c, size_t ldc, bool add, bool fetch, Stream *next) {
    BEGIN(0, c);
    if (panels > 1) BEGIN(1, c + PANEL);
    if (panels > 2) BEGIN(2, c + 2 * PANEL);
    if (panels > 3) BEGIN(3, c + 3 * PANEL);
    for (int step = 0; step < k / STEP_K; step++) {
        if (fetch)
            for (int p = 0; p < panels; p++) FETCH(p);
        if (next != NULL)
            for (int i = 0; i < STREAMS; i++) fetch_next(&next[i]);
        _tile_loadd(4, x + (size_t)step * STEP_BYTES, x_stride);
        WEIGHTS(6, 0);
        _tile_dpbf16ps(0, 4, 6);
        if (panels > 1) {
            WEIGHTS(7, 1);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (panels > 2) {
            WEIGHTS(6, 2);
            _tile_dpbf16ps(2, 4, 6);
        }
        if (panels > 3) {
            WEIGHTS(7, 3);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    END(0, c);
    if (panels > 1) END(1, c + PANEL);
    if (panels > 2) END(2, c + 2 * PANEL);
    if (panels > 3) END(3, c + 3 * PANEL);
}

/* Two tiles of `height` rows by 1 or 2 panels: each tile of x and of weights is used twice. */
AMX INLINE void wide(const int panels, const char *x, size_t x_stride, int height, const char *w, size_t panel_bytes, int k,
                     float *c, size_t ldc, bool add, Stream *next) {
    const char *lower_x = x + (size_t)height * x_stride;
    float *lower_c = c + (size_t)height * ldc;
    BEGIN(0, c);
    BEGIN(2, lower_c);
    if (panels > 1) BEGIN(1, c + PANEL);
    if (panels > 1) BEGIN(3, lower_c + PANEL);
    for (int step = 0; step < k / STEP_K; step++) {
        WEIGHTS(6, 0);
        _tile_loadd(4, x + (size_t)step * STEP_BYTES, x_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, lower_x + (size_t)step * STEP_BYTES, x_stride);
        _tile_dpbf16ps(2, 5, 6);
        if (next != NULL)
            for (int i = 0; i < STREAMS; i++) fetch_next(&next[i]);
        if (panels > 1) {
            WEIGHTS(7, 1);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    END(0, c);
    END(2, lower_c);
    if (panels > 1) END(1, c + PANEL);
    if (panels > 1) END(3, lower_c + PANEL);
}

/* One or two tiles of `height` rows by one or two panels. */
AMX static void block(int tiles, int height, int panels, const char *x, size_t x_stride, const char *w,
                      size_t panel_bytes, int k, float *c, size_t ldc, bool add, Stream *next) {
    if (tiles == 2 && panels == 2)
        wide(2, x, x_stride, height, w, panel_bytes, k, c, ldc, add, next);
    else if (tiles == 2)
        wide(1, x, x_stride, height, w, panel_bytes, k, c, ldc, add, next);
    else if (panels == 2)
        narrow(2, x, x_stride, w, panel_bytes, k, c, ldc, add, false, next);
    else
        narrow(1, x, x_stride, w, panel_bytes, k, c, ldc, add, false, next);
}

AMX static void one_tile_of_rows(const char *x, size_t x_stride, const char *w, size_t panel_bytes, int panels, int k,
                                 float *c, size_t ldc) {
    for (int p = 0; p < panels; p += 4, w += 4 * panel_bytes, c += 4 * PANEL)
        switch (panels - p) {
        case 1: narrow(1, x, x_stride, w, panel_bytes, k, c, ldc, false, true, NULL); break;
        case 2: narrow(2, x, x_stride, w, panel_bytes, k, c, ldc, false, true, NULL); break;
        case 3: narrow(3, x, x_stride, w, panel_bytes, k, c, ldc, false, true, NULL); break;
        default: narrow(4, x, x_stride, w, panel_bytes, k, c, ldc, false, true, NULL);
        }
}

/* One panel's segments of k inputs to bfloat16 lines, with their scales if these are exponents. */
PAIRS INLINE void widen(const Format weights, const char *w, int k, char *lines) {
    const int segment = segment_inputs(weights), group = group_inputs(weights);
    for (int at = 0; at < k; at += segment, w += LINE_BYTES) {
        const char *scales = w + codes_bytes(weights);
        for (int begin = 0; begin < segment; begin += group) {
            const bool has_exponents = layouts[weights].scales == EXPONENTS;
            const __m512i by = has_exponents ? lowered(_mm512_load_si512(scales), begin / group) : _mm512_setzero_si512();
            for (int i = 0; i < group; i += inputs_per_line(weights), w += LINE_BYTES) {
                __m512i pairs[4];
                _mm_prefetch(w + AHEAD_BYTES, _MM_HINT_T0);
                if (has_exponents)
                    decode_scaled(weights, _mm512_load_si512(w), by, pairs);
                else
                    decode_pairs(weights, _mm512_load_si512(w), pairs);
                for (int j = 0; j < PAIR_LINES(weights); j++, lines += LINE_BYTES) _mm512_store_si512(lines, pairs[j]);
            }
        }
    }
}

/* Like `block`, with lines of codes without their scales, which panels at `w` have. */
AMX INLINE void block_by_scales(const Format weights, int rows, int panels, const char *x, size_t x_stride,
                                const char *lines, const char *w, size_t panel_bytes, int k, float *c, size_t ldc,
                                bool add) {
    float sums[2 * ROWS][2 * PANEL] __attribute__((aligned(LINE_BYTES)));
    const int segment = segment_inputs(weights);
    for (int at = 0; at < k; at += segment, add = true) {
        block(rows > ROWS ? 2 : 1, ROWS, panels, x + (size_t)at * 2, x_stride, lines + (size_t)at * PANEL * 2,
              WIDE_BYTES, segment, sums[0], 2 * PANEL, false, NULL);
        w += codes_bytes(weights);
        for (int p = 0; p < panels; p++) {
            const __m512 scale = _mm512_load_ps(w + (size_t)p * panel_bytes);
            for (int r = 0; r < rows; r++) {
                float *to = c + (size_t)r * ldc + p * PANEL;
                const __m512 total = add ? _mm512_loadu_ps(to) : _mm512_setzero_ps();
                _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_load_ps(sums[r] + p * PANEL), scale, total));
            }
        }
        w += LINE_BYTES;
    }
}

/* Codes, one section of k at a time: all panels use its rows of x, all rows its weights. */
AMX INLINE void many_rows_of_codes(const Format weights, GEMM_PARAMETERS) {
    char lines[2][WIDE_BYTES] __attribute__((aligned(LINE_BYTES)));
    int configured = 0;
    for (int at = 0; at < k; at += BLOCK_K)
        for (int p = 0; p < panels; p += 2) {
            const int width = k - at < BLOCK_K ? k - at : BLOCK_K, some = p + 1 < panels ? 2 : 1;
            const char *ws = w + (size_t)p * panel_bytes + panel_bytes_of(weights, at);
            for (int i = 0; i < some; i++) widen(weights, ws + (size_t)i * panel_bytes, width, lines[i]);
            for (int row = 0; row < m; row += 2 * ROWS) {
                const int rows = m - row < 2 * ROWS ? m - row : 2 * ROWS;
                const char *xs = x + (size_t)row * x_stride + (size_t)at * 2;
                float *cs = c + (size_t)row * ldc + p * PANEL;
                if (rows != configured) configure(configured = rows);
                if (layouts[weights].scales == EXPONENTS)
                    block(rows > ROWS ? 2 : 1, ROWS, some, xs, x_stride, lines[0], WIDE_BYTES, width, cs, ldc, at > 0,
                          NULL);
                else
                    block_by_scales(weights, rows, some, xs, x_stride, lines[0], ws, panel_bytes, width, cs, ldc,
                                    at > 0);
            }
        }
}

AMX void gemm_amx_bf16_ahead(GEMM_PARAMETERS, const Ahead *ahead) {
    if (m <= ROWS) {
        gemm_amx_bf16(GEMM_ARGUMENTS);
        return;
    }
    /* Tiles of equal height: to configure them takes as long as a dozen products. */
    const int tiles = (m + ROWS - 1) / ROWS, height = (m + tiles - 1) / tiles;
    const int row_blocks = (tiles + 1) / 2, blocks = (panels + 1) / 2 * row_blocks, steps = k / STEP_K;
    configure_rows(height, height);
    for (int p = 0; p < panels; p += 2) {
        const int rest = panels - p;
        for (int i = 0; i < row_blocks; i++) {
            const size_t row = (size_t)(2 * i * height);
            Stream next[STREAMS];
            if (ahead != NULL) {
                const Region own = {w + (size_t)(p + 2) * panel_bytes, (size_t)(rest < 4 ? 1 : 2) * panel_bytes};
                next[0] = stream_of(rest > 2 ? own : ahead->weights, i, row_blocks, steps);
                next[1] = stream_of(ahead->rows, p / 2 * row_blocks + i, blocks, steps);
            }
            block(tiles - 2 * i < 2 ? 1 : 2, height, rest < 2 ? 1 : 2, x + row * x_stride, x_stride,
                  w + (size_t)p * panel_bytes, panel_bytes, k, c + row * ldc + p * PANEL, ldc, false,
                  ahead != NULL ? next : NULL);
        }
    }
    _tile_release();
}

AMX void gemm_amx_bf16(GEMM_PARAMETERS) {
    if (m <= AMX_FEW_ROWS) {
        gemm_amx_bf16_few(GEMM_ARGUMENTS);
        return;
    }
    if (m <= ROWS) {
        configure(m);
        one_tile_of_rows(x, x_stride, w, panel_bytes, panels, k, c, ldc);
        /* For a sleeping thread with live tiles, Linux saves 8 KiB. */
        _tile_release();
    } else {
        gemm_amx_bf16_ahead(GEMM_ARGUMENTS, NULL);
    }
}

/* Products with scales round as those of few rows. Not inlined: the arithmetic must not move across the changes of MXCSR. */
#define GEMM(FORMAT, ...)                                                                                          \
    AMX static __attribute__((noinline)) void many_##FORMAT(GEMM_PARAMETERS) {                                     \
        many_rows_of_codes(FORMAT, GEMM_ARGUMENTS);                                                                \
    }                                                                                                              \
    AMX void gemm_amx_##FORMAT(GEMM_PARAMETERS) {                                                                  \
        const bool has_exponents = layouts[FORMAT].scales == EXPONENTS;                                            \
        if (m <= (has_exponents ? AMX_FEW_ROWS_EXPONENTS : AMX_FEW_ROWS)) {                                        \
            gemm_amx_few_##FORMAT(GEMM_ARGUMENTS);                                                                 \
            return;                                                                                                \
        }                                                                                                          \
        const unsigned mode = _mm_getcsr();                                                                        \
        if (!has_exponents) _mm_setcsr(AS_TILES_ROUND);                                                            \
        many_##FORMAT(GEMM_ARGUMENTS);                                                                             \
        if (!has_exponents) _mm_setcsr(mode);                                                                      \
        _tile_release();                                                                                           \
    }
EACH_NARROW_FLOAT(GEMM)
#endif
