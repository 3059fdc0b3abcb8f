/* Products of float32 rows with weights of any format; included once per CPU level with TARGET, NAME(x) and
 * VECTOR_BYTES defined. */

#define VECTORS (LINE_BYTES / VECTOR_BYTES) /* Of a line. */
typedef float NAME(Floats) __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t NAME(Words) __attribute__((vector_size(VECTOR_BYTES)));
#define Floats NAME(Floats)
#define Words NAME(Words)

/* Input j of a line, in one of its vectors; integers without their scale. */
TARGET INLINE Floats NAME(unpack)(const Format weights, Words line, const int j) {
    if (weights == FLOAT32) return (Floats)line;
    /* A bfloat16 is the upper half of a float32. */
    if (weights == BFLOAT16) return (Floats)(j == 0 ? line << 16 : line & 0xffff0000u);
    const uint32_t shift = j % 4 * 8 + j / 4 * 4, mask = weights == INT4 ? 15 : 255;
    /* 2^23 with the code in its last bits: a conversion that every vector unit can do. */
    const float zero = 8388608.0f + (weights == INT4 ? 8 : 128);
    return (Floats)((line >> shift & mask) | 0x4b000000) - zero;
}

/* Adds k inputs of one panel to c; integers: one segment, which ends with its scales. */
TARGET INLINE void NAME(block)(const Format weights, const int rows, const char *x, size_t x_stride, const char *w,
                               int k, float *c, size_t ldc) {
    const int line_k = inputs_per_line(weights);
    /* Vector by vector, in unrolled loops: else the compiler keeps the sums in memory, at half of the speed. */
    Floats sums[ROWS][VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            sums[r][v] = (Floats){0};
            if (!is_integer(weights))
                memcpy(&sums[r][v], c + (size_t)r * ldc + v * (VECTOR_BYTES / sizeof(float)), VECTOR_BYTES);
        }
    for (int i = 0; i < k; i += line_k, w += LINE_BYTES) {
        const Words *line = (const Words *)w;
        __builtin_prefetch(w + AHEAD_BYTES);
#pragma GCC unroll 8
        for (int j = 0; j < line_k; j++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) {
                const Floats values = NAME(unpack)(weights, line[v], j);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++)
                    sums[r][v] += values * *(const float *)(x + (size_t)r * x_stride + (size_t)(i + j) * sizeof(float));
            }
    }
    const Floats *scale = (const Floats *)w;
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) {
            float *to = c + (size_t)r * ldc + v * (VECTOR_BYTES / sizeof(float));
            Floats total;
            memcpy(&total, to, VECTOR_BYTES);
            total = is_integer(weights) ? total + sums[r][v] * scale[v] : sums[r][v];
            memcpy(to, &total, VECTOR_BYTES);
        }
}

TARGET INLINE void NAME(gemm)(const Format weights, const char *x, size_t x_stride, int m, const char *w,
                              size_t panel_bytes, int panels, int k, float *c, size_t ldc) {
    const int line_k = inputs_per_line(weights);
    const int most = is_integer(weights) ? segment_inputs(weights) : m > ROWS ? BLOCK_LINES * line_k : k;
    for (int p = 0; p < panels; p++) {
        const char *ws = w + (size_t)p * panel_bytes;
        /* No branch for the first block: with one, the compiler fuses multiply and add for some rows only. */
        for (int row = 0; row < m; row++) memset(c + (size_t)row * ldc + p * PANEL, 0, PANEL * sizeof(float));
        for (int at = 0, width; at < k; at += width) {
            width = k - at < most ? k - at : most;
            for (int row = 0; row < m; row += ROWS) {
                const char *xs = x + (size_t)row * x_stride + (size_t)at * sizeof(float);
                float *cs = c + (size_t)row * ldc + p * PANEL;
                switch (m - row) {
                case 1: NAME(block)(weights, 1, xs, x_stride, ws, width, cs, ldc); break;
                case 2: NAME(block)(weights, 2, xs, x_stride, ws, width, cs, ldc); break;
                case 3: NAME(block)(weights, 3, xs, x_stride, ws, width, cs, ldc); break;
                default: NAME(block)(weights, 4, xs, x_stride, ws, width, cs, ldc);
                }
            }
            ws += (size_t)(width / line_k + is_integer(weights)) * LINE_BYTES;
        }
    }
}

#define GEMM(FUNCTION, WEIGHTS)                                                                                    \
    TARGET void FUNCTION(const char *x, size_t x_stride, int m, const char *w, size_t panel_bytes, int panels,     \
                         int k, float *c, size_t ldc) {                                                            \
        NAME(gemm)(WEIGHTS, x, x_stride, m, w, panel_bytes, panels, k, c, ldc);                                    \
    }
GEMM(NAME(gemm_f32), FLOAT32)
GEMM(NAME(gemm_bf16), BFLOAT16)
GEMM(NAME(gemm_int8), INT8)
GEMM(NAME(gemm_int4), INT4)

#undef GEMM
#undef Floats
#undef Words
#undef VECTORS
#undef VECTOR_BYTES
#undef TARGET
#undef NAME
