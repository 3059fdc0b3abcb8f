/* int8 and int4 weights times float32 rows with generic compiler vectors; included once per CPU level with TARGET,
 * NAME(x) and VECTOR_BYTES defined. */

#define VECTORS (LINE_BYTES / VECTOR_BYTES) /* Of a line. */
typedef float NAME(Floats) __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t NAME(Words) __attribute__((vector_size(VECTOR_BYTES)));
#define Floats NAME(Floats)
#define Words NAME(Words)

/* One panel of one segment: k inputs and then the scales. */
TARGET INLINE void NAME(segment)(const bool nibbles, const int rows, const char *x, size_t x_stride, const char *w, int k,
                                 float *c, size_t ldc) {
    const int line_k = nibbles ? 8 : 4;
    Floats sums[PORTABLE_ROWS][VECTORS] = {0};
    for (int i = 0; i < k; i += line_k, w += LINE_BYTES) {
        const Words *line = (const Words *)w;
        __builtin_prefetch(w + AHEAD_BYTES);
#pragma GCC unroll 8
        for (int j = 0; j < line_k; j++) {
            const uint32_t shift = j % 4 * 8 + j / 4 * 4, mask = nibbles ? 15 : 255;
            /* 2^23 with the code in its last bits: a conversion that every vector unit can do. */
            const float zero = 8388608.0f + (nibbles ? 8 : 128);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                const Floats codes = (Floats)((line[v] >> shift & mask) | 0x4b000000) - zero;
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++)
                    sums[r][v] += codes * *(const float *)(x + (size_t)r * x_stride + (size_t)(i + j) * sizeof(float));
            }
        }
    }
    const Floats *scale = (const Floats *)w;
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            float *at = c + (size_t)r * ldc + v * (VECTOR_BYTES / sizeof(float));
            Floats total;
            memcpy(&total, at, sizeof total);
            total += sums[r][v] * scale[v];
            memcpy(at, &total, sizeof total);
        }
}

TARGET INLINE void NAME(gemm_int)(const Format weights, const char *x, size_t x_stride, int m, const char *w,
                                  size_t panel_bytes, int panels, int k, float *c, size_t ldc) {
    const bool nibbles = weights == INT4;
    for (int p = 0; p < panels; p++) {
        const char *ws = w + (size_t)p * panel_bytes;
        /* No branch for the first segment: with one, the compiler fuses multiply and add for some rows only. */
        for (int row = 0; row < m; row++) memset(c + (size_t)row * ldc + p * PANEL, 0, PANEL * sizeof(float));
        for (int at = 0, width; at < k; at += width) {
            width = k - at < segment_inputs(weights) ? k - at : segment_inputs(weights);
            for (int row = 0; row < m; row += PORTABLE_ROWS) {
                const char *xs = x + (size_t)row * x_stride + (size_t)at * sizeof(float);
                float *cs = c + (size_t)row * ldc + p * PANEL;
                switch (m - row) {
                case 1: NAME(segment)(nibbles, 1, xs, x_stride, ws, width, cs, ldc); break;
                case 2: NAME(segment)(nibbles, 2, xs, x_stride, ws, width, cs, ldc); break;
                case 3: NAME(segment)(nibbles, 3, xs, x_stride, ws, width, cs, ldc); break;
                default: NAME(segment)(nibbles, 4, xs, x_stride, ws, width, cs, ldc);
                }
            }
            ws += (size_t)width * PANEL / (nibbles ? 2 : 1) + LINE_BYTES;
        }
    }
}

TARGET void NAME(gemm_int8)(const char *x, size_t x_stride, int m, const char *w, size_t panel_bytes, int panels, int k,
                            float *c, size_t ldc) {
    NAME(gemm_int)(INT8, x, x_stride, m, w, panel_bytes, panels, k, c, ldc);
}

TARGET void NAME(gemm_int4)(const char *x, size_t x_stride, int m, const char *w, size_t panel_bytes, int panels, int k,
                            float *c, size_t ldc) {
    NAME(gemm_int)(INT4, x, x_stride, m, w, panel_bytes, panels, k, c, ldc);
}

#undef Floats
#undef Words
#undef VECTORS
#undef VECTOR_BYTES
#undef TARGET
#undef NAME
