/* Products with int8 and int4 weights and activations of 15 bits, in integers: exact within each group.
 *
 * An activation is 128 * high + low, both int8, for the dot products of bytes (AVX512-VNNI, AMX): only the weights'
 * quantisation error matters. These take codes, which are unsigned:
 *
 *     sum of a group = (high . codes << 7) + low . codes - zero * (sum of the activations)
 *
 * It fits 32 bits: 16319 * 255 * 128 < 2^31 (in a group of 1024, 16319 * 128 * 1024), and intermediate overflows cancel.
 * Then it is multiplied by the group's scales and added to c in float32; at the last group c is multiplied by the
 * row's scale. AMX and VNNI give the same bits.
 */
#include "native.h"

#ifdef __x86_64__
#include "../../../eaas/threads/amx.h"
#include "codes.h"

/* Prefetch distance: the hardware prefetcher stops at each 4 KiB page. */
#define AHEAD_BYTES 4096
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vnni")))
#define AMX __attribute__((target("avx512f,avx512bw,avx512vnni,amx-tile,amx-int8")))

/* 6 rows by 2 panels: 24 sums, the weights and one of x nearly fill the 32 registers. */
#define ROWS 6
#define PANELS 2
/* With few rows, processors with AMX read memory faster in several streams, and others in one. */
#define MOST_STREAMS 4
#define ROWS_OF_STREAMS 2
/* With many rows: of two panels at most 32 KiB. A multiple of all segments. */
#define SECTION_INPUTS 1024
#define NIBBLES_GROUP 128 /* The longest of int4. */
#define TILE_ROWS 16
/* Up to this many rows, the dot products keep up with memory; AMX may be shared with another process. */
#define FEW_ROWS 4

bool vnni_works(void) { return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni"); }
bool amx_int8_works(void) { return vnni_works() && CPU_HAS_TILES("amx-int8"); }

/* Inputs of a tile: within a group. */
static inline int tile_inputs(Format weights) { return group_inputs(weights) < SPLIT_K ? group_inputs(weights) : SPLIT_K; }

/* Consecutive segments of one call. */
typedef struct {
    const char *x;     /* The first row. */
    size_t x_stride;
    int begin, end, k; /* Inputs of these segments, and of all. */
    const char *w;     /* At the first of these segments. */
    size_t panel_bytes;
    float *c;
    size_t ldc;
} Section;

static Section rows_from(const Section *s, int row) {
    Section rest = *s;
    rest.x += (size_t)row * s->x_stride;
    rest.c += (size_t)row * s->ldc;
    return rest;
}

/* The scales of a group of a panel. */
typedef struct {
    __m512 scale;
    __m512i zero;
} Scales;

/* At a line of scales, of the g-th group of the segment. */
VNNI INLINE Scales scales_at(const Format weights, const char *line, int g) {
    const int bits = layouts[weights].zero_bits;
    __m512i words = _mm512_load_si512(line);
    if (layouts[weights].scales == SHORTS)
        words = _mm512_and_si512(_mm512_slli_epi32(words, 16 - 16 * (unsigned)g), _mm512_set1_epi32((int)0xffff0000));
    if (bits == 0) return (Scales){_mm512_castsi512_ps(words), _mm512_set1_epi32(layouts[weights].zero)};
    const __m512i mask = _mm512_set1_epi32((1 << bits) - 1);
    return (Scales){_mm512_castsi512_ps(_mm512_andnot_si512(mask, words)), _mm512_and_si512(mask, words)};
}

static inline const SplitTail *tail_of(const Section *s, int r) {
    return split_tail((char *)s->x + (size_t)r * s->x_stride, s->k);
}

/* A row's total after the group that begins at input `at`; `is_signed`: its sums are of codes minus zeros already. */
VNNI INLINE __m512 add_group(const Format weights, const SplitTail *tail, int at, const Scales *scales, __m512i high,
                             __m512i low, const bool is_signed, __m512 total) {
    __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 7), low);
    if (!is_signed) {
        const __m512i of_zeros = _mm512_set1_epi32(tail->of_zeros[at / group_inputs(weights)]);
        sum = _mm512_add_epi32(sum, has_one_zero(weights) ? of_zeros : _mm512_mullo_epi32(scales->zero, of_zeros));
    }
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scales->scale, total);
}

/* The row's total before input `at`. */
VNNI INLINE __m512 total_at(const Section *s, int at, int r, int p) {
    return at == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(s->c + (size_t)r * s->ldc + p * PANEL);
}

/* Stores a total up to input `end`. */
VNNI INLINE void store_total(const Section *s, int end, int r, int p, __m512 total) {
    if (end >= s->k) total = _mm512_mul_ps(total, _mm512_set1_ps(tail_of(s, r)->scale));
    _mm512_storeu_ps(s->c + (size_t)r * s->ldc + p * PANEL, total);
}

/* `weights`, `rows` and `panels` are constants after inlining, so that the sums stay in registers. */
VNNI INLINE void vnni_block(const Format weights, const int rows, const int panels, const Section *s, size_t ahead) {
    const bool nibbles = inputs_per_line(weights) == 8;
    const int group = group_inputs(weights), groups = segment_inputs(weights) / group;
    const int together = tile_inputs(weights), lines = group / inputs_per_line(weights);
    /* The upper halves of a single panel have sums of their own: else one row would wait for its sums' latency. */
    const int apart = nibbles && panels == 1;
    /* Few totals stay in registers, too. */
    const bool keeps = rows * panels <= MOST_STREAMS;
    const char *w = s->w;
    const size_t x_stride = s->x_stride, panel_bytes = s->panel_bytes;
    __m512 total[ROWS][MOST_STREAMS];
    if (keeps)
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) total[r][p] = total_at(s, s->begin, r, p);
    int g = 0; /* The group's place in its segment. */
    for (int begin = s->begin; begin < s->end; begin += group) {
        const int end = s->end - begin < group ? s->end : begin + group;
        __m512i high[ROWS][MOST_STREAMS], low[ROWS][MOST_STREAMS];
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int p = 0; p < panels + apart; p++) {
                const bool begins_at_zeros = has_one_zero(weights) && p < panels;
                high[r][p] = _mm512_setzero_si512();
                low[r][p] = _mm512_set1_epi32(begins_at_zeros ? tail_of(s, r)->of_zeros[begin / group] : 0);
            }
        for (int at = begin; at < end; at += together) {
            const char *x = s->x + split_at(at);
#pragma GCC unroll 1
            for (int i = 0; i < together; i += inputs_per_line(weights), x += inputs_per_line(weights), w += LINE_BYTES) {
                __m512i even[MOST_STREAMS], odd[MOST_STREAMS];
#pragma GCC unroll 4
                for (int p = 0; p < panels; p++) {
                    __m512i bytes[2];
                    decode_bytes(weights, _mm512_load_si512(w + (size_t)p * panel_bytes), bytes);
                    _mm_prefetch(w + (size_t)p * panel_bytes + ahead, _MM_HINT_T0);
                    even[p] = bytes[0];
                    if (nibbles) odd[p] = bytes[1];
                }
/* Not the intrinsic: GCC 12 copies every sum around it, which halves the speed. */
#define DOT(sums, from, weights, bytes)                                                                            \
    do {                                                                                                           \
        const __m512i value = _mm512_set1_epi32(*(const int *)(x + (size_t)r * x_stride + (bytes)));               \
        _Pragma("GCC unroll 4") for (int p = 0; p < panels; p++)                                                   \
            __asm__("vpdpbusd %2, %1, %0" : "+v"(sums[r][from + p]) : "v"(weights[p]), "v"(value));                \
    } while (0)
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++) {
                    DOT(high, 0, even, 0);
                    DOT(low, 0, even, SPLIT_K);
                    if (nibbles) {
                        DOT(high, apart, odd, 4);
                        DOT(low, apart, odd, SPLIT_K + 4);
                    }
                }
#undef DOT
            }
        }
        if (apart)
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                high[r][0] = _mm512_add_epi32(high[r][0], high[r][1]);
                low[r][0] = _mm512_add_epi32(low[r][0], low[r][1]);
            }
        /* The scales follow the segment's other groups. */
        const char *line = w + (size_t)(groups - 1 - g) * lines * LINE_BYTES;
#pragma GCC unroll 4
        for (int p = 0; p < panels; p++) {
            const Scales scales = scales_at(weights, line + (size_t)p * panel_bytes, g);
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) {
                const __m512 before = keeps ? total[r][p] : total_at(s, begin, r, p);
                const __m512 after = add_group(weights, tail_of(s, r), begin, &scales, high[r][p], low[r][p],
                                               has_one_zero(weights), before);
                if (keeps)
                    total[r][p] = after;
                else
                    store_total(s, end, r, p, after);
            }
        }
        if (groups == 1 || ++g == groups) {
            w += LINE_BYTES;
            g = 0;
        }
    }
    if (keeps)
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int p = 0; p < panels; p++) store_total(s, s->end, r, p, total[r][p]);
}

#define CASE(ROWS)                                                                                                 \
    case ROWS * 8 + 1: vnni_block(weights, ROWS, 1, s, ahead); break;                                              \
    case ROWS * 8 + 2: vnni_block(weights, ROWS, 2, s, ahead); break;
#define FEW_CASE(ROWS)                                                                                             \
    case ROWS * 8 + 3: vnni_block(weights, ROWS, 3, s, ahead); break;                                              \
    case ROWS * 8 + 4: vnni_block(weights, ROWS, 4, s, ahead); break;
VNNI INLINE void vnni_rows(const Format weights, int rows, int panels, const Section *s, size_t ahead) {
    switch (rows * 8 + panels) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
        FEW_CASE(1) FEW_CASE(2)
    }
}

/* Section by section for all rows: a section's weights are read once and stay in the L1 cache. `streams`: panels at once
 * if there are few rows, and `few`: of so many rows. */
VNNI INLINE void vnni(const Format weights, int streams, int few, GEMM_PARAMETERS) {
    const int at_once = m <= few ? streams : PANELS, most = m <= ROWS ? k : SECTION_INPUTS;
    for (int p = 0; p < panels; p += at_once) {
        const int width = panels - p < at_once ? panels - p : at_once;
        Section s = {.x = x, .x_stride = x_stride, .k = k, .w = w + (size_t)p * panel_bytes, .panel_bytes = panel_bytes,
                     .c = c + p * PANEL, .ldc = ldc};
        for (; s.begin < k; s.w += panel_bytes_of(weights, s.end - s.begin), s.begin = s.end) {
            s.end = k - s.begin < most ? k : s.begin + most;
            for (int row = 0; row < m; row += ROWS) {
                const Section part = rows_from(&s, row);
                vnni_rows(weights, m - row < ROWS ? m - row : ROWS, width, &part, row == 0 ? AHEAD_BYTES : 0);
            }
        }
    }
}

/* Tiles 0-3 are sums (panel 0: high, low, panel 1: high, low), 4 and 5 highs and lows of x, 6 and 7 weights. */
static void configure(uint8_t rows, uint8_t inputs) {
    const uint8_t lines = inputs / 4;
    amx_configure((const uint8_t[8]){rows, rows, rows, rows, rows, rows, lines, lines},
                  (const uint8_t[8]){LINE_BYTES, LINE_BYTES, LINE_BYTES, LINE_BYTES, inputs, inputs, LINE_BYTES, LINE_BYTES});
}

/* Tile numbers must be literals. */
#define DOT_TILES(SUM, X, W)                                                                                       \
    do {                                                                                                           \
        if (is_signed)                                                                                             \
            _tile_dpbssd(SUM, X, W);                                                                               \
        else                                                                                                       \
            _tile_dpbsud(SUM, X, W);                                                                               \
    } while (0)

/* All tiles' rows by one or two panels and a group; `w` are bytes (of int4: unpacked and signed), `scales` the panels'
 * scales, c is written from row `from` on. */
AMX INLINE void amx_block(const Format weights, const int panels, const Section *s, const char *w, size_t panel_bytes,
                          const Scales *scales, int from, int rows, bool fetch) {
    const bool is_signed = inputs_per_line(weights) == 8;
    const int step = tile_inputs(weights), tile_bytes = step / 4 * LINE_BYTES;
    int32_t sums[2 * PANELS][TILE_ROWS * PANEL] __attribute__((aligned(LINE_BYTES)));
    _tile_zero(0);
    _tile_zero(1);
    if (panels > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int at = s->begin; at < s->end; at += step, w += tile_bytes) {
        const char *x = s->x + split_at(at);
        _tile_loadd(6, w, LINE_BYTES);
        _tile_loadd(4, x, s->x_stride);
        DOT_TILES(0, 4, 6);
        _tile_loadd(5, x + SPLIT_K, s->x_stride);
        DOT_TILES(1, 5, 6);
        if (panels > 1) _tile_loadd(7, w + panel_bytes, LINE_BYTES);
        if (fetch)
            for (int line = 0; line < tile_bytes; line += LINE_BYTES) {
                _mm_prefetch(w + line + 2 * AHEAD_BYTES, _MM_HINT_T0);
                if (panels > 1) _mm_prefetch(w + panel_bytes + line + 2 * AHEAD_BYTES, _MM_HINT_T0);
            }
        if (panels > 1) {
            DOT_TILES(2, 4, 7);
            DOT_TILES(3, 5, 7);
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
            store_total(s, s->end, r, p,
                        add_group(weights, tail_of(s, r), s->begin, &scales[p],
                                  _mm512_load_si512(sums[2 * p] + r * PANEL),
                                  _mm512_load_si512(sums[2 * p + 1] + r * PANEL), is_signed,
                                  total_at(s, s->begin, r, p)));
}

/* Lines of nibbles to twice as many of codes minus zeros. */
VNNI INLINE void unpack(const Format weights, const char *w, int k, __m512i zeros, char *out) {
    const __m512i zero = _mm512_mullo_epi32(zeros, _mm512_set1_epi32(0x01010101));
    for (int at = 0; at < k; at += 8, w += LINE_BYTES, out += 2 * LINE_BYTES) {
        __m512i bytes[2];
        decode_bytes(weights, _mm512_load_si512(w), bytes);
        _mm_prefetch(w + AHEAD_BYTES, _MM_HINT_T0);
        for (int i = 0; i < 2; i++) _mm512_store_si512(out + i * LINE_BYTES, _mm512_sub_epi8(bytes[i], zero));
    }
}

AMX INLINE void amx(const Format weights, GEMM_PARAMETERS) {
    const bool nibbles = inputs_per_line(weights) == 8;
    const int groups = segment_inputs(weights) / group_inputs(weights);
    const size_t codes_of_group = (size_t)(group_inputs(weights) / inputs_per_line(weights)) * LINE_BYTES;
    char bytes[PANELS][NIBBLES_GROUP * PANEL] __attribute__((aligned(LINE_BYTES)));
    /* All tiles have one height; the last one overlaps the one before. */
    const int height = (m + (m + TILE_ROWS - 1) / TILE_ROWS - 1) / ((m + TILE_ROWS - 1) / TILE_ROWS);
    configure((uint8_t)height, (uint8_t)tile_inputs(weights));
    for (int p = 0; p < panels; p += PANELS) {
        const int width = panels - p < PANELS ? panels - p : PANELS;
        Section s = {.x = x, .x_stride = x_stride, .k = k, .w = w + (size_t)p * panel_bytes, .panel_bytes = panel_bytes,
                     .c = c + p * PANEL, .ldc = ldc};
        for (; s.begin < k; s.begin = s.end) {
            s.end = k - s.begin < group_inputs(weights) ? k : s.begin + group_inputs(weights);
            /* Its place in the segment, and what is between its codes and the scales. */
            const int g = s.begin % segment_inputs(weights) / group_inputs(weights);
            const size_t rest = (size_t)(groups - 1 - g) * codes_of_group;
            const size_t codes_bytes = (size_t)((s.end - s.begin) / inputs_per_line(weights)) * LINE_BYTES;
            const char *tiles = s.w;
            size_t tiles_stride = panel_bytes;
            Scales scales[PANELS];
            for (int i = 0; i < width; i++) {
                const char *panel = s.w + (size_t)i * panel_bytes;
                scales[i] = scales_at(weights, panel + codes_bytes + rest, g);
                if (nibbles) unpack(weights, panel, s.end - s.begin, scales[i].zero, bytes[i]);
            }
            if (nibbles) {
                tiles = bytes[0];
                tiles_stride = sizeof bytes[0];
            }
            for (int row = 0; row < m; row += height) {
                const int first = m - row < height ? m - height : row;
                const Section part = rows_from(&s, first);
                const bool fetch = !nibbles && row == 0;
                if (width == 2)
                    amx_block(weights, 2, &part, tiles, tiles_stride, scales, row - first, height, fetch);
                else
                    amx_block(weights, 1, &part, tiles, tiles_stride, scales, row - first, height, fetch);
            }
            s.w += codes_bytes + (rest == 0 ? LINE_BYTES : 0);
        }
    }
    /* For a sleeping thread with live tiles, Linux saves 8 KiB. */
    _tile_release();
}

#define GEMMS(FORMAT, ...)                                                                                         \
    VNNI static void vnni_##FORMAT(int streams, int few, GEMM_PARAMETERS) {                                        \
        vnni(FORMAT, streams, few, GEMM_ARGUMENTS);                                                                \
    }                                                                                                              \
    VNNI void gemm_vnni_##FORMAT(GEMM_PARAMETERS) { vnni_##FORMAT(1, ROWS, GEMM_ARGUMENTS); }                      \
    AMX void gemm_amx_##FORMAT(GEMM_PARAMETERS) {                                                                  \
        if (m <= FEW_ROWS)                                                                                         \
            vnni_##FORMAT(MOST_STREAMS, ROWS_OF_STREAMS, GEMM_ARGUMENTS);                                          \
        else                                                                                                       \
            amx(FORMAT, GEMM_ARGUMENTS);                                                                           \
    }
EACH_INTEGER(GEMMS)
#endif
