/* Products of float32 rows with weights of any format; included once per CPU level with TARGET, NAME(x) and
 * VECTOR_BYTES defined. */

#define VECTORS (LINE_BYTES / VECTOR_BYTES) /* Of a line. */
typedef float NAME(Floats) __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t NAME(Words) __attribute__((vector_size(VECTOR_BYTES)));
#define Floats NAME(Floats)
#define Words NAME(Words)

#include "codes.h"

/* The scales of the channels in one of the vectors of a line of scales, for the g-th group of the segment; integers: their
 * zeros, plus 2^23. */
TARGET INLINE Floats NAME(scales)(const Format weights, Words line, int g, Floats *zero) {
    if (layouts[weights].scales == EXPONENTS) return (Floats)((line >> 8 * g & 255) << 23);
    const uint32_t mask = (1u << layouts[weights].zero_bits) - 1;
    *zero = NAME(integers)(mask ? line & mask : (Words){0} + layouts[weights].zero);
    if (layouts[weights].scales == SHORTS) return (Floats)(g == 0 ? line << 16 : line & 0xffff0000u);
    return (Floats)(line & ~mask);
}

/* Adds k inputs of one panel to c; formats with scales: one group, the g-th of the segment whose scales are at `scales`. */
TARGET INLINE void NAME(block)(const Format weights, const int rows, const char *x, size_t x_stride, const char *w,
                               const char *scales, int g, int k, float *c, size_t ldc) {
    const int line_k = inputs_per_line(weights);
    /* Vector by vector, in unrolled loops: else the compiler keeps the sums in memory, at half of the speed. */
    Floats sums[ROWS][VECTORS], scale[VECTORS], zero[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++)
        if (has_scales(weights)) scale[v] = NAME(scales)(weights, ((const Words *)scales)[v], g, &zero[v]);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            sums[r][v] = (Floats){0};
            if (!has_scales(weights))
                memcpy(&sums[r][v], c + (size_t)r * ldc + v * (VECTOR_BYTES / sizeof(float)), VECTOR_BYTES);
        }
    for (int i = 0; i < k; i += line_k, w += LINE_BYTES) {
        const Words *line = (const Words *)w;
        __builtin_prefetch(w + AHEAD_BYTES);
#pragma GCC unroll 8
        for (int j = 0; j < line_k; j++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                const Floats values = NAME(values)(weights, line[v], j, zero[v]);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++)
                    sums[r][v] += values * *(const float *)(x + (size_t)r * x_stride + (size_t)(i + j) * sizeof(float));
            }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            float *to = c + (size_t)r * ldc + v * (VECTOR_BYTES / sizeof(float));
            Floats total;
            memcpy(&total, to, VECTOR_BYTES);
            total = has_scales(weights) ? total + sums[r][v] * scale[v] : sums[r][v];
            memcpy(to, &total, VECTOR_BYTES);
        }
}

/* Adds k inputs of one panel to c, for all rows. */
TARGET INLINE void NAME(all_rows)(const Format weights, const char *x, size_t x_stride, int m, const char *w,
                                  const char *scales, int g, int k, float *c, size_t ldc) {
    for (int row = 0; row < m; row += ROWS, x += ROWS * x_stride, c += ROWS * ldc) {
        switch (m - row) {
        case 1: NAME(block)(weights, 1, x, x_stride, w, scales, g, k, c, ldc); break;
        case 2: NAME(block)(weights, 2, x, x_stride, w, scales, g, k, c, ldc); break;
        case 3: NAME(block)(weights, 3, x, x_stride, w, scales, g, k, c, ldc); break;
        default: NAME(block)(weights, 4, x, x_stride, w, scales, g, k, c, ldc);
        }
    }
}

TARGET INLINE void NAME(gemm)(const Format weights, GEMM_PARAMETERS) {
    const int line_k = inputs_per_line(weights), segment = segment_inputs(weights);
    const int most = has_scales(weights) ? group_inputs(weights) : m > ROWS ? BLOCK_LINES * line_k : k;
    for (int p = 0; p < panels; p++) {
        const char *ws = w + (size_t)p * panel_bytes, *scales = ws;
        /* No branch for the first block: with one, the compiler fuses multiply and add for some rows only. */
        for (int row = 0; row < m; row++) memset(c + (size_t)row * ldc + p * PANEL, 0, PANEL * sizeof(float));
        for (int at = 0, g = 0, width; at < k; at += width, g++) {
            width = k - at < most ? k - at : most;
            if (has_scales(weights) && at % segment == 0) {
                const int codes = k - at < segment ? k - at : segment;
                if (at > 0) ws += LINE_BYTES;
                scales = ws + (size_t)(codes / line_k) * LINE_BYTES;
                g = 0;
            }
            NAME(all_rows)(weights, x + (size_t)at * sizeof(float), x_stride, m, ws, scales, g, width, c + p * PANEL, ldc);
            ws += (size_t)(width / line_k) * LINE_BYTES;
        }
    }
}

#define GEMM(FORMAT, ...) TARGET void NAME(gemm_##FORMAT)(GEMM_PARAMETERS) { NAME(gemm)(FORMAT, GEMM_ARGUMENTS); }
EACH_FORMAT(GEMM)

#undef GEMM
#undef Floats
#undef Words
#undef VECTORS
#undef VECTOR_BYTES
#undef TARGET
#undef NAME
