/* The compiled expert kernel: shared declarations.
 *
 * Legend: T tokens, K top-k, H hidden, I intermediate, E logical experts; N rows (a token and one of its
 * experts), sorted by expert. In products: m rows, n output channels, k inputs.
 *
 * Packed weights. A matrix (n, k) is cut into contiguous panels of 16 output channels, so that a product reads
 * memory strictly forward:
 *
 *     float32    panel p | k = 0: 16 floats | k = 1: 16 floats | ...
 *     bfloat16   panel p | k = 0,1: 16 pairs | k = 2,3: 16 pairs | ...      ("VNNI", for the dot products)
 *     int8       panel p | segment of 1024 k | segment | ...     a segment: k = 0..3: 16 quads | ... | 16 scales
 *     int4       panel p | segment of 128 k | segment | ...      a segment: k = 0..7: 16 quads | ... | 16 scales
 *
 * An int8 is stored as code + 128, an int4 as code + 8 (a byte has k = j, lower half, and k = j + 4); the scales are
 * float32. n is padded to 16 and k to `padded_k` with zeros. In the first product of a gated expert the panels alternate,
 * 16 gate channels and then the same 16 up channels, so that one task has both and can apply the activation.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../../../eaas/threads/pool.h"

#define PANEL 16         /* Output channels of a panel: one vector of float32. */
#define LINE_BYTES 64

/* Compiles a function for each vector width; the loader picks one. Needs glibc; GCC 11 has no x86-64 levels yet. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define EACH_VECTOR_WIDTH __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EACH_VECTOR_WIDTH __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define EACH_VECTOR_WIDTH
#endif

/* -- products (gemm_*.c) ------------------------------------------------------------------------------------ */

/* c[m][16 * panels] = x[m][k] . w, float32.
 *
 * x: rows in the format of the kernel, `x_stride` bytes apart. w: the first panel; panels are `panel_bytes` apart.
 * k: padded. c: `ldc` floats between rows.
 *
 * The order of summation depends on k only, not on m and panels: bit for bit, a row's result does not depend on
 * the other rows.
 */
typedef void Gemm(const char *x, size_t x_stride, int m, const char *w, size_t panel_bytes, int panels, int k,
                  float *c, size_t ldc);

/* SPLIT is for x only: see SplitTail. */
typedef enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3, SPLIT = 4 } Format;

typedef struct {
    const char *isa;
    bool (*works)(void);
    Format weights;      /* Format of the packed weights. */
    Format x;            /* Format of the rows. */
    Gemm *gemm;
} GemmKind;

/* All kinds in this build, the fastest first; ends with isa == NULL. */
extern const GemmKind gemm_kinds[];

/* Bytes per value. A split row takes half of its float32 row, in place. */
static inline size_t format_bytes(Format format) { return format == BFLOAT16 ? 2 : 4; }

#define INT4_SEGMENT 128
#define INT8_SEGMENT 1024

/* Inputs of a line of packed weights: 1, 2, 4 or 8. */
static inline int inputs_per_line(Format weights) { return 1 << weights; }
static inline bool is_integer(Format weights) { return weights == INT8 || weights == INT4; }
static inline int segment_inputs(Format weights) { return weights == INT4 ? INT4_SEGMENT : INT8_SEGMENT; }

/* Padded k: a multiple of a tile row for AMX, of a segment for int4. */
static inline int padded_k(Format weights, int k) {
    const int unit = weights == INT4 ? INT4_SEGMENT : weights == INT8 ? 64 : 32;
    return (k + unit - 1) / unit * unit;
}

/* k: padded. */
static inline size_t panel_bytes_of(Format weights, int k) {
    const int segment = segment_inputs(weights), scales = is_integer(weights) ? (k + segment - 1) / segment : 0;
    return (size_t)(k / inputs_per_line(weights) + scales) * LINE_BYTES;
}

Gemm gemm_amx_bf16, gemm_amx_bf16_few, gemm_avx512_bf16, gemm_avx512_f32;
/* gemm_amx_bf16 leaves up to this many rows to gemm_amx_bf16_few. */
#define AMX_FEW_ROWS 4
bool amx_works(void), avx512_bf16_works(void), avx512_works(void);
/* Configures the eight tiles: rows of LINE_BYTES. */
void amx_configure(const uint8_t rows[8]);
Gemm gemm_avx512_fp8, gemm_avx512_mxfp4;
bool avx512_codes_works(void);
Gemm gemm_amx_int8, gemm_amx_int4, gemm_vnni_int8, gemm_vnni_int4;
bool amx_int8_works(void), vnni_works(void);
Gemm gemm_f32_avx2, gemm_bf16_avx2, gemm_int8_avx2, gemm_int4_avx2;
Gemm gemm_f32_plain, gemm_bf16_plain, gemm_int8_plain, gemm_int4_plain;
bool avx2_works(void), plain_works(void);

/* -- rows of 15 bits (split.c) ------------------------------------------------------------------------------ */

/* A row of x for integer products: x = scale * (128 * high + low), high and low int8.
 *
 *     64 highs | their 64 lows | 64 highs | 64 lows | ... | tail
 */
#define SPLIT_K 64

typedef struct {
    float scale;      /* NaN if a value of the row is NaN or infinite: then the result is NaN, too. */
    int32_t offset[]; /* Per segment: corrects for weights stored as code + 128, or + 8. */
} SplitTail;

/* k: padded. */
static inline SplitTail *split_tail(char *row, int k) { return (SplitTail *)(row + 2 * (size_t)k); }

/* x (width) -> row, for products with weights of this format; may be in place. */
void split_row(const float *x, int width, Format weights, char *row);

/* -- rows of another format (convert.c) --------------------------------------------------------------------- */

/* x (width) -> out (width); each of FLOAT32 and BFLOAT16, to the nearest with ties to even. */
void convert_row(const char *x, Format from, int width, Format to, char *out);

/* -- weights (pack.c) --------------------------------------------------------------------------------------- */

/* Packs a matrix of n rows, `stride` words of 4 bytes apart, into panels that are `panel_words` apart:
 * words (n, words) -> [n / 16][words][16]. Does not write beyond n in the last panel. */
void pack_rows(const uint32_t *rows, size_t stride, size_t n, size_t words, uint32_t *out, size_t panel_words);

/* -- activations (activation.c) ----------------------------------------------------------------------------- */

/* The numbers are those of ActivationKind in activation.py. */
typedef enum { SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, CLAMPED_SWIGLU } ActivationKind;

typedef struct {
    ActivationKind kind;
    bool has_gate;
    float alpha, limit;
} Activation;

/* product: `panels` panels of one row (gate, up, gate, up, ... if there is a gate), without the biases
 * (NULL: none; laid out like product). out: 16 * panels (or half of it with a gate) values in `format`. */
void activate(const Activation *activation, const float *product, const float *bias, int panels, void *out,
              Format format);

/* -- the layer (moe.c) -------------------------------------------------------------------------------------- */

/* An expert's packed tensors; up == 0 if it is not held. Mirrored by native.py. */
typedef struct {
    uint64_t up, down;           /* Addresses of the panels. */
    uint64_t up_bias, down_bias; /* float32, padded like the panels; 0: none. */
} Expert;

typedef struct {
    const GemmKind *kind;
    Pool *pool;
    const Expert *experts;       /* (E) */
    int num_experts, hidden, intermediate;
    Activation activation;
    const char *x;               /* (T, H) in x_format, contiguous. */
    Format x_format;             /* FLOAT32 or BFLOAT16. */
    const void *ids;             /* (T, K); -1: none here. May change during the call: clients can write there. */
    bool ids_are_wide;           /* int64, else int32. */
    const float *scores;         /* (T, K) */
    int tokens, top_k;
    float *out;                  /* (T, H), overwritten. */
    int64_t *counts;             /* (1 + E), or NULL: adds the number of experts with rows, and each expert's rows. */
    char *scratch;               /* moe_scratch_bytes(...), aligned to 64. */
} Moe;

/* Scratch memory for a call, bytes. */
size_t moe_scratch_bytes(const GemmKind *kind, int threads, int hidden, int intermediate, int tokens, int top_k,
                         int num_experts);
/* Returns -1, or the first id that is not held (out is then undefined). */
int64_t moe_run(const Moe *moe);
