/* Packs a matrix of rows into panels, three times as fast as torch's strided copy; quantised ones with their scales. */
#include "native.h"

#include <string.h>

#include "codes.h"

/* Words transposed at a time: a cache line of each of the sixteen rows. */
#define TURN 16

EACH_VECTOR_WIDTH
static void turn(const uint32_t *rows, size_t stride, int height, size_t words, uint32_t *out) {
    for (size_t word = 0; word < words; word++)
        for (int row = 0; row < height; row++) out[word * PANEL + row] = rows[row * stride + word];
}

EACH_VECTOR_WIDTH
static void turn_tile(const uint32_t *rows, size_t stride, uint32_t *out) {
    uint32_t tile[PANEL * TURN];
    for (int row = 0; row < PANEL; row++) memcpy(tile + row * TURN, rows + row * stride, TURN * sizeof(uint32_t));
    for (int word = 0; word < TURN; word++)
        for (int row = 0; row < PANEL; row++) out[word * PANEL + row] = tile[row * TURN + word];
}

void pack_rows(const uint32_t *rows, size_t stride, size_t n, size_t words, uint32_t *out, size_t panel_words) {
    for (; n > 0; rows += PANEL * stride, out += panel_words) {
        const int height = n < PANEL ? (int)n : PANEL;
        size_t word = 0;
        if (height == PANEL)
            for (; word + TURN <= words; word += TURN) turn_tile(rows + word, stride, out + word * PANEL);
        turn(rows + word, stride, height, words - word, out + word * PANEL);
        n -= (size_t)height;
    }
}

/* Words of consecutive inputs as the format has them. */
EACH_VECTOR_WIDTH
static void arrange(Format format, uint32_t *words, int count) {
#define ARRANGE(FORMAT, CODE, ...)                                                                                 \
    case FORMAT:                                                                                                   \
        for (int i = 0; i < count; i++) words[i] = arrange_##CODE(words[i]);                                       \
        break;
    switch (format) { EACH_CODED(ARRANGE) default: break; }
}

/* The scale of the group of an input: a float32's bits, or an exponent; clears *is_finite if it is not. */
INLINE uint32_t scale_at(const Codes *codes, ScaleKind kind, size_t channel, int input, bool *is_finite) {
    const size_t at = channel * codes->scales_stride + (size_t)(input / codes->group);
    if (kind == EXPONENTS) {
        const uint32_t exponent = ((const uint8_t *)codes->scales)[at];
        if (exponent > LARGEST_EXPONENT) *is_finite = false;
        return exponent;
    }
    uint32_t bits;
    memcpy(&bits, (const float *)codes->scales + at, sizeof bits);
    if ((bits & 0x7f800000) == 0x7f800000) *is_finite = false;
    return bits;
}

/* A channel's scales of the segment that begins at input `at`, as a word; clears *is_finite if they are not. */
static uint32_t scale_word(const Codes *codes, Format format, size_t channel, int at, bool *is_finite) {
    const Layout *layout = &layouts[format];
    if (layout->scales == EXPONENTS || layout->scales == SHORTS) {
        const int end = at + layout->segment < codes->inputs ? at + layout->segment : codes->inputs;
        uint32_t word = 0;
        for (int g = 0; at < end; at += layout->group, g++) {
            const uint32_t scale = scale_at(codes, layout->scales, channel, at, is_finite);
            /* A bfloat16 is the upper half of a float32. */
            word |= layout->scales == EXPONENTS ? scale << 8 * g : scale >> 16 << 16 * g;
        }
        return word;
    }
    const uint32_t bits = scale_at(codes, layout->scales, channel, at, is_finite);
    const uint32_t mask = (1u << layout->zero_bits) - 1;
    if (mask == 0) return bits;
    const size_t group = channel * codes->zeros_stride + (size_t)(at / codes->group);
    return ((bits + mask / 2 + 1) & ~mask) | (codes->zeros ? codes->zeros[group] : codes->zero);
}

bool pack_codes(const Codes *codes, Format format, size_t n, uint32_t *out, size_t panel_words) {
    const int per_word = inputs_per_line(format), segment = segment_inputs(format);
    const int k = padded_k(format, codes->inputs), words = k / per_word, segment_words = segment / per_word;
    const size_t bytes = ((size_t)codes->inputs * 4 + (size_t)per_word - 1) / (size_t)per_word;
    bool is_finite = true;
    for (size_t first = 0; first < n; first += PANEL, out += panel_words) {
        const int height = n - first < PANEL ? (int)(n - first) : PANEL;
        const uint8_t *rows = codes->codes + first * codes->codes_stride;
        for (int word = 0; word < words; word += TURN) {
            uint32_t tile[PANEL * TURN] = {0};
            const size_t from = (size_t)word * 4, size = from < bytes ? bytes - from : 0;
            for (int row = 0; row < height; row++)
                memcpy(tile + row * TURN, rows + (size_t)row * codes->codes_stride + from, size < 64 ? size : 64);
            arrange(format, tile, PANEL * TURN);
            uint32_t lines[TURN * PANEL];
            turn_tile(tile, TURN, lines);
            for (int i = 0; i < TURN && word + i < words; i++)
                memcpy(out + (size_t)(word + i + (word + i) / segment_words) * PANEL, lines + i * PANEL, LINE_BYTES);
        }
        for (int at = 0, line = 0; at < k; at += segment) {
            line += k - at < segment ? (k - at) / per_word : segment_words;
            for (int row = 0; row < height && at < codes->inputs; row++)
                out[(size_t)line * PANEL + row] = scale_word(codes, format, first + (size_t)row, at, &is_finite);
            line++;
        }
    }
    return is_finite;
}
