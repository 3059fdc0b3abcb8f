/* Products with int8 and int4 weights and activations of 15 bits, in integers: exact within each segment.
 *
 * An activation is 128 * high + low, both int8, for the dot products of bytes (AVX512-VNNI, AMX): only the weights'
 * quantisation error matters. These take unsigned weights: code + 128 (or + 8), corrected by `offset`.
 *
 *     sum of a segment = (high . w << 7) + low . w + offset
 *
 * It fits 32 bits: 16319 * 127 * 1024 < 2^31, and intermediate overflows cancel. Then it is multiplied by the segment's
 * scales and added to c in float32; at the last segment c is multiplied by the row's scale. AMX and VNNI
 * give the same bits.
 */
#include "native.h"

#ifdef __x86_64__
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
/* Prefetch distance: the hardware prefetcher stops at each 4 KiB page. */
#define AHEAD_BYTES 4096
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vnni")))
#define AMX __attribute__((target("avx512f,avx512bw,avx512vnni,amx-tile,amx-int8")))

/* 6 rows by 2 panels: 24 sums, the weights and one of x nearly fill the 32 registers. With few rows, more panels:
 * memory is read faster in several streams. */
#define ROWS 6
#define PANELS 2
#define FEW_ROWS_PANELS 4
#define FEW_ROWS_OF_PANELS 2
#define TILE_ROWS 16
#define TILE_BYTES 1024
/* Up to this many rows, the dot products keep up with memory; AMX may be shared with another process. */
#define FEW_ROWS 4

bool vnni_works(void) { return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni"); }
bool amx_int8_works(void) { return vnni_works() && __builtin_cpu_supports("amx-int8") && amx_works(); }

/* One segment of one call. */
typedef struct {
    const char *x;     /* At the segment. */
    size_t x_stride;
    const char *tail;  /* The first row's SplitTail. */
    int number, k;
    bool is_first, is_last;
    const char *w;     /* At the segment. */
    size_t panel_bytes, w_bytes;
    float *c;
    size_t ldc;
} Segment;

VNNI INLINE void finish(const Segment *s, int r, int p, __m512i high, __m512i low) {
    const SplitTail *tail = (const SplitTail *)(s->tail + (size_t)r * s->x_stride);
    float *c = s->c + (size_t)r * s->ldc + p * PANEL;
    const __m512i offset = _mm512_set1_epi32(tail->offset[s->number]);
    const __m512 sum = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(high, 7), low), offset));
    const __m512 scale = _mm512_load_ps(s->w + (size_t)p * s->panel_bytes + s->w_bytes);
    __m512 total = _mm512_fmadd_ps(sum, scale, s->is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(c));
    if (s->is_last) total = _mm512_mul_ps(total, _mm512_set1_ps(tail->scale));
    _mm512_storeu_ps(c, total);
}

/* `rows`, `panels` and `nibbles` are constants after inlining, so that the sums stay in registers. */
VNNI INLINE void vnni_block(const bool nibbles, const int rows, const int panels, const Segment *s, size_t ahead) {
    const __m512i mask = _mm512_set1_epi8(15);
    __m512i high[ROWS][FEW_ROWS_PANELS], low[ROWS][FEW_ROWS_PANELS];
    const char *x = s->x, *w = s->w;
    const size_t x_stride = s->x_stride, panel_bytes = s->panel_bytes;
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) high[r][p] = low[r][p] = _mm512_setzero_si512();
    for (int at = 0; at < s->k; at += SPLIT_K, x += SPLIT_K)
        for (int i = 0; i < SPLIT_K; i += nibbles ? 8 : 4, x += nibbles ? 8 : 4, w += LINE_BYTES) {
            __m512i even[FEW_ROWS_PANELS], odd[FEW_ROWS_PANELS];
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) {
                even[p] = _mm512_load_si512(w + (size_t)p * panel_bytes);
                _mm_prefetch(w + (size_t)p * panel_bytes + ahead, _MM_HINT_T0);
                if (nibbles) {
                    odd[p] = _mm512_and_si512(_mm512_srli_epi16(even[p], 4), mask);
                    even[p] = _mm512_and_si512(even[p], mask);
                }
            }
/* Not the intrinsic: GCC 12 copies every sum around it, which halves the speed. */
#define DOT(sums, weights, bytes)                                                                                  \
    do {                                                                                                           \
        const __m512i value = _mm512_set1_epi32(*(const int *)(x + (size_t)r * x_stride + (bytes)));               \
        _Pragma("GCC unroll 4") for (int p = 0; p < panels; p++)                                                   \
            __asm__("vpdpbusd %2, %1, %0" : "+v"(sums[r][p]) : "v"(weights[p]), "v"(value));                       \
    } while (0)
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                DOT(high, even, 0);
                DOT(low, even, SPLIT_K);
                if (nibbles) {
                    DOT(high, odd, 4);
                    DOT(low, odd, SPLIT_K + 4);
                }
            }
#undef DOT
        }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) finish(s, r, p, high[r][p], low[r][p]);
}

#define CASE(NIBBLES, ROWS)                                                                                        \
    case ROWS * 8 + 1: vnni_block(NIBBLES, ROWS, 1, s, ahead); break;                                              \
    case ROWS * 8 + 2: vnni_block(NIBBLES, ROWS, 2, s, ahead); break;
#define FEW_CASE(NIBBLES, ROWS)                                                                                    \
    case ROWS * 8 + 3: vnni_block(NIBBLES, ROWS, 3, s, ahead); break;                                              \
    case ROWS * 8 + 4: vnni_block(NIBBLES, ROWS, 4, s, ahead); break;
#define DISPATCH(NAME, NIBBLES)                                                                                    \
    VNNI static void NAME(int rows, int panels, const Segment *s, size_t ahead) {                                  \
        switch (rows * 8 + panels) {                                                                               \
            CASE(NIBBLES, 1) CASE(NIBBLES, 2) CASE(NIBBLES, 3) CASE(NIBBLES, 4) CASE(NIBBLES, 5) CASE(NIBBLES, 6)  \
            FEW_CASE(NIBBLES, 1) FEW_CASE(NIBBLES, 2)                                                              \
        }                                                                                                          \
    }
DISPATCH(vnni_bytes, false)
DISPATCH(vnni_nibbles, true)

static Segment first_segment(const char *x, size_t x_stride, const char *w, size_t panel_bytes, int k, float *c,
                             size_t ldc) {
    return (Segment){.x = x, .x_stride = x_stride, .tail = (const char *)split_tail((char *)x, k), .w = w,
                     .panel_bytes = panel_bytes, .c = c, .ldc = ldc};
}

/* Sets the segment that begins at input `at`; its x, w and number are those of the last one, or the first. */
static void enter(Segment *s, Format weights, int at, int k) {
    s->k = k - at < segment_inputs(weights) ? k - at : segment_inputs(weights);
    s->w_bytes = (size_t)(s->k / inputs_per_line(weights)) * LINE_BYTES;
    s->is_first = at == 0;
    s->is_last = at + s->k == k;
}

static void leave(Segment *s) {
    s->x += 2 * s->k;
    s->w += s->w_bytes + LINE_BYTES;
    s->number++;
}

static Segment rows_from(const Segment *s, int row) {
    Segment rest = *s;
    rest.x += (size_t)row * s->x_stride;
    rest.tail += (size_t)row * s->x_stride;
    rest.c += (size_t)row * s->ldc;
    return rest;
}

/* Segment by segment for all rows: a segment's weights are read once and stay in the L1 cache. */
INLINE void vnni(const Format weights, const char *x, size_t x_stride, int m, const char *w, size_t panel_bytes,
                 int panels, int k, float *c, size_t ldc) {
    const int at_once = m <= FEW_ROWS_OF_PANELS ? FEW_ROWS_PANELS : PANELS;
    for (int p = 0; p < panels; p += at_once) {
        const int width = panels - p < at_once ? panels - p : at_once;
        Segment s = first_segment(x, x_stride, w + (size_t)p * panel_bytes, panel_bytes, k, c + p * PANEL, ldc);
        for (int at = 0; at < k; at += s.k) {
            enter(&s, weights, at, k);
            for (int row = 0; row < m; row += ROWS) {
                const Segment part = rows_from(&s, row);
                const int rows = m - row < ROWS ? m - row : ROWS;
                (weights == INT4 ? vnni_nibbles : vnni_bytes)(rows, width, &part, row == 0 ? AHEAD_BYTES : 0);
            }
            leave(&s);
        }
    }
}

/* Tiles 0-3 are sums (panel 0: high, low, panel 1: high, low), 4 and 5 highs and lows of x, 6 and 7 weights. */
static void configure(uint8_t rows) {
    amx_configure((const uint8_t[8]){rows, rows, rows, rows, rows, rows, TILE_ROWS, TILE_ROWS});
}

/* All tiles' rows by one or two panels; `w` are bytes (of int4: unpacked), c is written from row `from` on. */
AMX INLINE void amx_block(const int panels, const Segment *s, const char *w, size_t panel_bytes, int from, int rows,
                          bool fetch) {
    int32_t sums[2 * PANELS][TILE_ROWS * PANEL] __attribute__((aligned(LINE_BYTES)));
    const char *x = s->x;
    _tile_zero(0);
    _tile_zero(1);
    if (panels > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int at = 0; at < s->k; at += SPLIT_K, x += 2 * SPLIT_K, w += TILE_BYTES) {
        _tile_loadd(6, w, LINE_BYTES);
        _tile_loadd(4, x, s->x_stride);
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(5, x + SPLIT_K, s->x_stride);
        _tile_dpbsud(1, 5, 6);
        if (panels > 1) _tile_loadd(7, w + panel_bytes, LINE_BYTES);
        if (fetch)
            for (int line = 0; line < TILE_BYTES; line += LINE_BYTES) {
                _mm_prefetch(w + line + 2 * AHEAD_BYTES, _MM_HINT_T0);
                if (panels > 1) _mm_prefetch(w + panel_bytes + line + 2 * AHEAD_BYTES, _MM_HINT_T0);
            }
        if (panels > 1) {
            _tile_dpbsud(2, 4, 7);
            _tile_dpbsud(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], LINE_BYTES);
    _tile_stored(1, sums[1], LINE_BYTES);
    if (panels > 1) {
        _tile_stored(2, sums[2], LINE_BYTES);
        _tile_stored(3, sums[3], LINE_BYTES);
    }
    for (int p = 0; p < panels; p++)
        for (int r = from; r < rows; r++)
            finish(s, r, p, _mm512_load_si512(sums[2 * p] + r * PANEL), _mm512_load_si512(sums[2 * p + 1] + r * PANEL));
}

VNNI static void unpack(const char *w, int k, char *out) {
    const __m512i mask = _mm512_set1_epi8(15);
    for (int at = 0; at < k; at += 8, w += LINE_BYTES, out += 2 * LINE_BYTES) {
        const __m512i line = _mm512_load_si512(w);
        _mm_prefetch(w + AHEAD_BYTES, _MM_HINT_T0);
        _mm512_store_si512(out, _mm512_and_si512(line, mask));
        _mm512_store_si512(out + LINE_BYTES, _mm512_and_si512(_mm512_srli_epi16(line, 4), mask));
    }
}

AMX INLINE void amx(const Format weights, const char *x, size_t x_stride, int m, const char *w, size_t panel_bytes,
                    int panels, int k, float *c, size_t ldc) {
    char bytes[PANELS][INT4_SEGMENT * PANEL] __attribute__((aligned(LINE_BYTES)));
    /* All tiles have one height; the last one overlaps the one before. */
    const int height = (m + (m + TILE_ROWS - 1) / TILE_ROWS - 1) / ((m + TILE_ROWS - 1) / TILE_ROWS);
    configure((uint8_t)height);
    for (int p = 0; p < panels; p += PANELS) {
        const int width = panels - p < PANELS ? panels - p : PANELS;
        Segment s = first_segment(x, x_stride, w + (size_t)p * panel_bytes, panel_bytes, k, c + p * PANEL, ldc);
        for (int at = 0; at < k; at += s.k) {
            enter(&s, weights, at, k);
            const char *tiles = s.w;
            size_t tiles_stride = panel_bytes;
            if (weights == INT4) {
                for (int i = 0; i < width; i++) unpack(s.w + (size_t)i * panel_bytes, s.k, bytes[i]);
                tiles = bytes[0];
                tiles_stride = sizeof bytes[0];
            }
            for (int row = 0; row < m; row += height) {
                const int first = m - row < height ? m - height : row;
                const Segment part = rows_from(&s, first);
                const bool fetch = weights == INT8 && row == 0;
                if (width == 2)
                    amx_block(2, &part, tiles, tiles_stride, row - first, height, fetch);
                else
                    amx_block(1, &part, tiles, tiles_stride, row - first, height, fetch);
            }
            leave(&s);
        }
    }
    /* For a sleeping thread with live tiles, Linux saves 8 KiB. */
    _tile_release();
}

#define GEMM_VNNI(NAME, WEIGHTS)                                                                                   \
    VNNI void NAME(const char *x, size_t x_stride, int m, const char *w, size_t panel_bytes, int panels, int k,    \
                   float *c, size_t ldc) {                                                                         \
        vnni(WEIGHTS, x, x_stride, m, w, panel_bytes, panels, k, c, ldc);                                          \
    }
#define GEMM_AMX(NAME, WEIGHTS, FEW)                                                                               \
    AMX void NAME(const char *x, size_t x_stride, int m, const char *w, size_t panel_bytes, int panels, int k,     \
                  float *c, size_t ldc) {                                                                          \
        if (m <= FEW_ROWS)                                                                                         \
            FEW(x, x_stride, m, w, panel_bytes, panels, k, c, ldc);                                                \
        else                                                                                                       \
            amx(WEIGHTS, x, x_stride, m, w, panel_bytes, panels, k, c, ldc);                                       \
    }
GEMM_VNNI(gemm_vnni_int8, INT8)
GEMM_VNNI(gemm_vnni_int4, INT4)
GEMM_AMX(gemm_amx_int8, INT8, gemm_vnni_int8)
GEMM_AMX(gemm_amx_int4, INT4, gemm_vnni_int4)
#endif
