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
 *     others     panel p | segment | segment | ...
 *
 * A segment of quantised weights is lines of 16 words, one for each channel, and then a line of scales (`ScaleKind`). The
 * weight of a code is scale * (code - zero). How a word holds codes, and what they stand for, is in a header of codes/ for
 * each code.
 *
 * n is padded to 16 with zeros, and k to `padded_k` with codes of scale 0 or inputs of 0. In the first product of a gated
 * expert the panels alternate, 16 gate channels and then the same 16 up channels, so that one task has both and can apply
 * the activation.
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

/* -- formats of weights ------------------------------------------------------------------------------------- */

/* What a word of a line of scales holds. */
typedef enum {
    NO_SCALES,
    OF_CHANNELS, /* A float32, the same in each segment. */
    OF_SEGMENTS, /* A float32 for the segment; its lowest bits hold the zero in formats with zero points. */
    SHORTS,      /* bfloat16s: half g for the segment's g-th group. */
    EXPONENTS,   /* Of powers of two: byte g for the segment's g-th group. */
} ScaleKind;

/* Every format of packed weights. A matrix is packed into the first of its code that has its groups and its zero points.
 *
 *     format       code     line unit segment group scales  zero zero_bits      (see Layout)
 */
#define EACH_FLOAT(X)                                                                                              \
    /* Without scales: a multiple of a tile row for AMX. */                                                        \
    X(FLOAT32,     float32,  1,   32,    0,    0, NO_SCALES,     0, 0)                                             \
    X(BFLOAT16,    bfloat16, 2,   32,    0,    0, NO_SCALES,     0, 0)
/* Exact in bfloat16, and multiplied as such. */
#define EACH_NARROW_FLOAT(X)                                                                                       \
    X(FP8,         fp8,      4,  128,  128,  128, OF_SEGMENTS,   0, 0)                                             \
    X(MXFP4,       mxfp4,    8,  128,  128,   32, EXPONENTS,     0, 0)
/* Multiplied as integers. */
#define EACH_INTEGER(X)                                                                                            \
    X(INT8,        int8,     4,   64, 1024, 1024, OF_CHANNELS, 128, 0)                                             \
    X(INT8_GROUPS, int8,     4,  128,  128,  128, OF_SEGMENTS, 128, 0)                                             \
    X(INT8_ZEROS,  int8,     4,  128,  128,  128, OF_SEGMENTS,   0, 8)                                             \
    X(INT8_SMALL,  int8,     4,   64,   32,   32, OF_SEGMENTS,   0, 8)                                             \
    X(INT4,        int4,     8,  128,  128,  128, OF_SEGMENTS,   0, 5)                                             \
    X(INT4_SHORT,  int4,     8,   64,   64,   32, SHORTS,        8, 0)                                             \
    X(INT4_GROUPS, int4,     8,   64,   32,   32, OF_SEGMENTS,   0, 5)
#define EACH_CODED(X) EACH_NARROW_FLOAT(X) EACH_INTEGER(X)
#define EACH_FORMAT(X) EACH_FLOAT(X) EACH_CODED(X)

#define NUMBER(FORMAT, ...) FORMAT,
typedef enum {
    EACH_FORMAT(NUMBER)
    FORMATS,
    SPLIT = FORMATS /* For x only: see SplitTail. */
} Format;

/* How weights of a format are packed. */
typedef struct {
    const char *code; /* Its name, as eaas/checkpoint/quantized.py has it. */
    int per_line;     /* Inputs of a line: 1, 2, 4 or 8. */
    int unit;         /* k is padded to a multiple of it. */
    int segment;      /* Inputs between two lines of scales; 0: no scales. */
    int group;        /* Inputs of a scale; a divisor of the segment. */
    ScaleKind scales;
    int zero;         /* Code of the weight 0, if it is the same for all. */
    int zero_bits;    /* Lowest bits of a scale that hold the code of the weight 0. */
} Layout;

#define LAYOUT(FORMAT, CODE, ...) [FORMAT] = {#CODE, __VA_ARGS__},
static const Layout layouts[FORMATS] = {EACH_FORMAT(LAYOUT)};

/* Bytes per value. A split row takes half of its float32 row, in place. */
static inline size_t format_bytes(Format format) { return format == BFLOAT16 ? 2 : 4; }

/* The largest of EXPONENTS, 2^(exponent - 127), with which the weight 6 is finite. */
#define LARGEST_EXPONENT 252

static inline int inputs_per_line(Format weights) { return layouts[weights].per_line; }
static inline bool has_one_zero(Format weights) { return layouts[weights].zero_bits == 0; }
static inline bool has_scales(Format weights) { return layouts[weights].segment > 0; }
static inline int segment_inputs(Format weights) { return layouts[weights].segment; }
static inline int group_inputs(Format weights) { return layouts[weights].group; }

static inline int padded_k(Format weights, int k) {
    const int unit = layouts[weights].unit;
    return (k + unit - 1) / unit * unit;
}

/* Number of segments of k (padded) inputs. */
static inline int segments_of(Format weights, int k) {
    return has_scales(weights) ? (k + segment_inputs(weights) - 1) / segment_inputs(weights) : 0;
}

/* Bytes of a segment's codes; its scales follow. */
static inline size_t codes_bytes(Format weights) {
    return (size_t)(segment_inputs(weights) / inputs_per_line(weights)) * LINE_BYTES;
}

/* k: padded. */
static inline size_t panel_bytes_of(Format weights, int k) {
    return (size_t)(k / inputs_per_line(weights) + segments_of(weights, k)) * LINE_BYTES;
}

/* -- products (gemm_*.c) ------------------------------------------------------------------------------------ */

/* c[m][16 * panels] = x[m][k] . w, float32.
 *
 * x: rows in the format of the kernel, `x_stride` bytes apart. w: the first panel; panels are `panel_bytes` apart.
 * k: padded. c: `ldc` floats between rows.
 *
 * The order of summation depends on k only, not on m and panels: bit for bit, a row's result does not depend on
 * the other rows.
 */
#define GEMM_PARAMETERS                                                                                            \
    const char *x, size_t x_stride, int m, const char *w, size_t panel_bytes, int panels, int k, float *c, size_t ldc
#define GEMM_ARGUMENTS x, x_stride, m, w, panel_bytes, panels, k, c, ldc
typedef void Gemm(GEMM_PARAMETERS);

typedef struct {
    const char *at;
    size_t bytes;
} Region;

/* What a thread reads after a product: the first two panels, and rows. */
typedef struct {
    Region weights, rows;
} Ahead;

/* The same product, which while it multiplies fetches its next weights and what comes after them; NULL: neither. It
 * reads up to GEMM_SPARE_ROWS rows after x, whatever is there, and overwrites c up to a multiple of as many rows. */
typedef void GemmAhead(GEMM_PARAMETERS, const Ahead *ahead);
#define GEMM_SPARE_ROWS 16

typedef struct {
    const char *isa;
    bool (*works)(void);
    Format weights;      /* Format of the packed weights. */
    Format x;            /* Format of the rows. */
    Gemm *gemm;
    GemmAhead *ahead;    /* NULL: none. */
} GemmKind;

/* All kinds in this build, the fastest first; ends with isa == NULL. */
extern const GemmKind gemm_kinds[];

GemmAhead gemm_amx_bf16_ahead;
Gemm gemm_amx_bf16, gemm_amx_bf16_few, gemm_avx512_bf16, gemm_avx512_f32;
#define OF_NARROW_FLOATS(FORMAT, ...) Gemm gemm_amx_##FORMAT, gemm_amx_few_##FORMAT, gemm_avx512_##FORMAT;
#define OF_INTEGERS(FORMAT, ...) Gemm gemm_amx_##FORMAT, gemm_vnni_##FORMAT;
#define OF_FLOAT_ROWS(FORMAT, ...) Gemm gemm_##FORMAT##_avx2, gemm_##FORMAT##_plain;
EACH_NARROW_FLOAT(OF_NARROW_FLOATS)
EACH_INTEGER(OF_INTEGERS)
EACH_FORMAT(OF_FLOAT_ROWS)
/* The AMX products of bfloat16 rows leave up to this many to these. With exponents, FMA costs more than decoding for
 * tiles. */
#define AMX_FEW_ROWS 4
#define AMX_FEW_ROWS_EXPONENTS 2
/* MXCSR of code that sums as tiles do: round to nearest, subnormals are zero, no exceptions. */
#define AS_TILES_ROUND 0x9fc0
bool amx_works(void), amx_int8_works(void);
bool avx512_bf16_works(void), avx512_works(void), avx512_codes_works(void), vnni_works(void);
bool avx2_works(void), plain_works(void);

/* -- rows of 15 bits (split.c) ------------------------------------------------------------------------------ */

/* A row of x for integer products: x = scale * (128 * high + low), high and low int8.
 *
 *     64 highs | their 64 lows | 64 highs | 64 lows | ... | tail
 */
#define SPLIT_K 64

typedef struct {
    float scale;        /* NaN if a value of the row is NaN or infinite: then the result is NaN, too. */
    int32_t of_zeros[]; /* Of each group: the sum of its integers, times -1 and, if all weights have one, their zero. */
} SplitTail;

/* Where the high of an input is; its low is SPLIT_K further. */
static inline size_t split_at(int input) { return 2 * (size_t)(input / SPLIT_K * SPLIT_K) + input % SPLIT_K; }

/* k: padded. */
static inline SplitTail *split_tail(char *row, int k) { return (SplitTail *)(row + 2 * (size_t)k); }

/* x (width) -> row, for products with weights of this format; may be in place. */
void split_row(const float *x, int width, Format weights, char *row);

/* -- rows of another format (convert.c) --------------------------------------------------------------------- */

/* x (width) -> out (width); each of FLOAT32 and BFLOAT16, to the nearest with ties to even. */
void convert_row(const char *x, Format from, int width, Format to, char *out);

/* Adds an expert's output times the score, rounded to bfloat16. A float sum of a few such values is almost always
 * exact, so that it does not depend on how a token's experts are divided among servers. */
void add_bfloat16(const float *values, const float *bias, float score, int width, float *out);

/* The same, of the values order[0], order[1], ... of x. */
void reorder_row(const char *x, Format from, const int32_t *order, int width, Format to, char *out);

/* -- weights (pack.c) --------------------------------------------------------------------------------------- */

/* Packs a matrix of n rows, `stride` words of 4 bytes apart, into panels that are `panel_words` apart:
 * words (n, words) -> [n / 16][words][16]. Does not write beyond n in the last panel. */
void pack_rows(const uint32_t *rows, size_t stride, size_t n, size_t words, uint32_t *out, size_t panel_words);

/* Output channels of a quantised matrix, as QuantizedMatrix in quantized.py holds them. */
typedef struct {
    int inputs;
    int group;            /* Inputs of a scale; a multiple of the format's group, or `inputs`. */
    const uint8_t *codes; /* (n, inputs), or (n, ceil(inputs / 2)): input 2i in the lower half of byte i. */
    const void *scales;   /* (n, groups): float32, or exponents (uint8). */
    const uint8_t *zeros; /* (n, groups); NULL: `zero` everywhere. Formats with zeros only. */
    uint8_t zero;
    size_t codes_stride, scales_stride, zeros_stride; /* Elements between two channels. */
} Codes;

/* Packs n channels like pack_rows. Returns whether all scales are finite. */
bool pack_codes(const Codes *codes, Format format, size_t n, uint32_t *out, size_t panel_words);

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
    uint64_t up_order;           /* int32 (H): the value of a hidden state that is the k-th input of up; 0: the k-th. */
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
