/* Products with generic compiler vectors; included once per CPU level with TARGET and NAME(x) defined.
 *
 * x is float32 even for bfloat16 weights: a bfloat16 is the upper half of a float32. */

TARGET static inline __attribute__((always_inline)) void NAME(block_f32)(
    const int rows, const char *x, size_t x_stride, const char *w, int k, float *c, size_t ldc, bool add) {
    Float8 low[ROWS], high[ROWS];
    for (int r = 0; r < rows; r++) {
        low[r] = add ? *(const Float8u *)(c + r * ldc) : (Float8){0};
        high[r] = add ? *(const Float8u *)(c + r * ldc + 8) : (Float8){0};
    }
    for (int i = 0; i < k; i++) {
        const Float8 *line = (const Float8 *)(w + (size_t)i * LINE_BYTES);
        __builtin_prefetch(w + (size_t)i * LINE_BYTES + AHEAD_BYTES);
        for (int r = 0; r < rows; r++) {
            const float value = *(const float *)(x + r * x_stride + (size_t)i * 4);
            low[r] += line[0] * value;
            high[r] += line[1] * value;
        }
    }
    for (int r = 0; r < rows; r++) {
        *(Float8u *)(c + r * ldc) = low[r];
        *(Float8u *)(c + r * ldc + 8) = high[r];
    }
}

TARGET static inline __attribute__((always_inline)) void NAME(block_bf16)(
    const int rows, const char *x, size_t x_stride, const char *w, int k, float *c, size_t ldc, bool add) {
    Float8 low[ROWS], high[ROWS];
    for (int r = 0; r < rows; r++) {
        low[r] = add ? *(const Float8u *)(c + r * ldc) : (Float8){0};
        high[r] = add ? *(const Float8u *)(c + r * ldc + 8) : (Float8){0};
    }
    for (int i = 0; i < k; i += 2) {
        const Word8 *line = (const Word8 *)(w + (size_t)i * (LINE_BYTES / 2));
        __builtin_prefetch(w + (size_t)i * (LINE_BYTES / 2) + AHEAD_BYTES);
        const Float8 low_even = (Float8)(line[0] << 16), low_odd = (Float8)(line[0] & 0xffff0000u);
        const Float8 high_even = (Float8)(line[1] << 16), high_odd = (Float8)(line[1] & 0xffff0000u);
        for (int r = 0; r < rows; r++) {
            const float *value = (const float *)(x + r * x_stride + (size_t)i * 4);
            low[r] += low_even * value[0];
            low[r] += low_odd * value[1];
            high[r] += high_even * value[0];
            high[r] += high_odd * value[1];
        }
    }
    for (int r = 0; r < rows; r++) {
        *(Float8u *)(c + r * ldc) = low[r];
        *(Float8u *)(c + r * ldc + 8) = high[r];
    }
}

#define GEMM(WHOLE, BLOCK, LINE_K)                                                                                 \
    TARGET void WHOLE(const char *x, size_t x_stride, int m, const char *w, size_t panel_bytes, int panels, int k,  \
                      float *c, size_t ldc) {                                                                      \
        const int block = m > ROWS ? BLOCK_LINES * LINE_K : k;                                                     \
        for (int p = 0; p < panels; p++)                                                                           \
            for (int at = 0; at < k; at += block)                                                                  \
                for (int row = 0; row < m; row += ROWS) {                                                          \
                    const int width = k - at < block ? k - at : block;                                             \
                    const char *xs = x + (size_t)row * x_stride + (size_t)at * sizeof(float);                      \
                    const char *ws = w + (size_t)p * panel_bytes + (size_t)(at / LINE_K) * LINE_BYTES;             \
                    float *cs = c + (size_t)row * ldc + p * PANEL;                                                 \
                    switch (m - row) {                                                                             \
                    case 1: BLOCK(1, xs, x_stride, ws, width, cs, ldc, at > 0); break;                             \
                    case 2: BLOCK(2, xs, x_stride, ws, width, cs, ldc, at > 0); break;                             \
                    case 3: BLOCK(3, xs, x_stride, ws, width, cs, ldc, at > 0); break;                             \
                    default: BLOCK(4, xs, x_stride, ws, width, cs, ldc, at > 0);                                   \
                    }                                                                                              \
                }                                                                                                  \
    }
GEMM(NAME(gemm_f32), NAME(block_f32), 1)
GEMM(NAME(gemm_bf16), NAME(block_bf16), 2)
#undef GEMM
#undef TARGET
#undef NAME
