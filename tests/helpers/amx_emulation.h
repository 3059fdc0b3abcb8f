/* Intel AMX without its hardware: the intrinsics that the expert kernel uses, as the Intel 64 and IA-32 Architectures
 * Software Developer's Manual, volume 2, defines their instructions. Needs AVX-512.
 *
 * What raises #UD or #GP there ends the process here. Each thread has its own tiles.
 */
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CPU_HAS_TILES(FEATURE) (__builtin_cpu_supports("avx512f") != 0)

#define EMULATED __attribute__((target("avx512f"), unused, noinline)) static
enum { EMULATED_TILES = 8, EMULATED_ROWS = 16, EMULATED_ROW_BYTES = 64 };

typedef struct {
    int rows, bytes_per_row;
    uint8_t row[EMULATED_ROWS][EMULATED_ROW_BYTES];
} EmulatedTile;

typedef struct {
    uint8_t is_configured;
    EmulatedTile tile[EMULATED_TILES];
} EmulatedTiles;

/* One for all files that include this header: tiles are a thread's, not a file's. */
__attribute__((weak)) _Thread_local EmulatedTiles emulated_tiles;

EMULATED void emulated_fault(const char *what) {
    fprintf(stderr, "AMX emulation: %s\n", what);
    abort();
}

EMULATED EmulatedTile *emulated_tile(int number) {
    if (!emulated_tiles.is_configured) emulated_fault("#UD: tiles are not configured");
    if (number < 0 || number >= EMULATED_TILES) emulated_fault("no such tile");
    EmulatedTile *tile = &emulated_tiles.tile[number];
    if (tile->rows == 0 || tile->bytes_per_row == 0) emulated_fault("#UD: the tile has no rows");
    return tile;
}

/* LDTILECFG: all tiles become zeros. */
EMULATED void emulated_loadconfig(const void *at) {
    const uint8_t *config = at;
    if (config[0] != 1) emulated_fault("#GP: not palette 1");
    for (int i = 2; i < 16; i++)
        if (config[i]) emulated_fault("#GP: a reserved byte is set");
    memset(&emulated_tiles, 0, sizeof emulated_tiles);
    emulated_tiles.is_configured = 1;
    for (int i = 0; i < 16; i++) {
        uint16_t bytes;
        memcpy(&bytes, config + 16 + 2 * i, sizeof bytes);
        const int rows = config[48 + i];
        if (i >= EMULATED_TILES && (rows || bytes)) emulated_fault("#GP: more than eight tiles");
        if (rows > EMULATED_ROWS || bytes > EMULATED_ROW_BYTES) emulated_fault("#GP: a tile is too large");
        if ((rows == 0) != (bytes == 0)) emulated_fault("#GP: a tile with rows or columns only");
        if (i >= EMULATED_TILES) continue;
        emulated_tiles.tile[i].rows = rows;
        emulated_tiles.tile[i].bytes_per_row = bytes;
    }
}

EMULATED void emulated_release(void) { memset(&emulated_tiles, 0, sizeof emulated_tiles); }

EMULATED void emulated_zero(int number) { memset(emulated_tile(number)->row, 0, sizeof emulated_tiles.tile[0].row); }

EMULATED void emulated_load(int number, const void *base, size_t stride) {
    EmulatedTile *tile = emulated_tile(number);
    memset(tile->row, 0, sizeof tile->row);
    for (int r = 0; r < tile->rows; r++)
        memcpy(tile->row[r], (const char *)base + r * stride, (size_t)tile->bytes_per_row);
}

EMULATED void emulated_store(int number, void *base, size_t stride) {
    const EmulatedTile *tile = emulated_tile(number);
    for (int r = 0; r < tile->rows; r++)
        memcpy((char *)base + r * stride, tile->row[r], (size_t)tile->bytes_per_row);
}

/* The checks of a product: sum (M, N) += a (M, K) . b (K, N), of dwords. */
EMULATED void emulated_check(int sum, int a, int b) {
    const EmulatedTile *to = emulated_tile(sum), *left = emulated_tile(a), *right = emulated_tile(b);
    if (sum == a || sum == b || a == b) emulated_fault("#UD: a product of a tile with itself");
    if (to->bytes_per_row % 4 || left->bytes_per_row % 4) emulated_fault("#UD: columns are no whole dwords");
    if (to->rows != left->rows || to->bytes_per_row != right->bytes_per_row || left->bytes_per_row / 4 != right->rows)
        emulated_fault("#UD: the tiles' sizes do not fit each other");
}

/* TDPBF16PS. Even and odd inputs have sums of their own, which begin at zero; then both, and the tile's value, are added.
 * FMA with round to nearest; subnormals are zero on both sides, and MXCSR does not matter. */
EMULATED void emulated_dpbf16ps(int sum, int a, int b) {
    emulated_check(sum, a, b);
    EmulatedTile *to = &emulated_tiles.tile[sum];
    const EmulatedTile *left = &emulated_tiles.tile[a], *right = &emulated_tiles.tile[b];
    const unsigned mode = _mm_getcsr();
    _mm_setcsr(0x9fc0);
    for (int m = 0; m < to->rows; m++) {
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        for (int k = 0; k < left->bytes_per_row / 4; k++) {
            uint32_t pair;
            memcpy(&pair, left->row[m] + 4 * k, sizeof pair);
            const __m512i x = _mm512_set1_epi32((int)pair), y = _mm512_loadu_si512(right->row[k]);
            const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
            even = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)),
                                   _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)), even);
            odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, upper)),
                                  _mm512_castsi512_ps(_mm512_and_si512(y, upper)), odd);
            /* The sums of one step are ready before the next one: no contraction, no other order. */
            __asm__ volatile("" : "+v"(even), "+v"(odd));
        }
        const __m512 both = _mm512_add_ps(even, odd);
        _mm512_storeu_ps(to->row[m], _mm512_add_ps(_mm512_loadu_ps(to->row[m]), both));
    }
    __asm__ volatile("" ::: "memory");
    _mm_setcsr(mode);
    for (int r = 0; r < to->rows; r++)
        memset(to->row[r] + to->bytes_per_row, 0, (size_t)(EMULATED_ROW_BYTES - to->bytes_per_row));
}

/* TDPBSSD and TDPBSUD: bytes of a are signed, those of b are or are not. Sums wrap. */
EMULATED void emulated_dpbs(int sum, int a, int b, int is_signed) {
    emulated_check(sum, a, b);
    EmulatedTile *to = &emulated_tiles.tile[sum];
    const EmulatedTile *left = &emulated_tiles.tile[a], *right = &emulated_tiles.tile[b];
    for (int m = 0; m < to->rows; m++) {
        __m512i total = _mm512_loadu_si512(to->row[m]);
        for (int k = 0; k < left->bytes_per_row / 4; k++)
            for (unsigned i = 0; i < 4; i++) {
                const __m512i last = _mm512_slli_epi32(_mm512_loadu_si512(right->row[k]), 24 - 8 * i);
                const __m512i bytes = is_signed ? _mm512_srai_epi32(last, 24) : _mm512_srli_epi32(last, 24);
                const __m512i x = _mm512_set1_epi32((int8_t)left->row[m][4 * (unsigned)k + i]);
                total = _mm512_add_epi32(total, _mm512_mullo_epi32(x, bytes));
            }
        _mm512_storeu_si512(to->row[m], total);
        memset(to->row[m] + to->bytes_per_row, 0, (size_t)(EMULATED_ROW_BYTES - to->bytes_per_row));
    }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#define _tile_loadconfig(at) emulated_loadconfig(at)
#define _tile_release() emulated_release()
#define _tile_zero(tile) emulated_zero(tile)
#define _tile_loadd(tile, base, stride) emulated_load(tile, base, stride)
#define _tile_stream_loadd(tile, base, stride) emulated_load(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated_store(tile, base, stride)
#define _tile_dpbf16ps(sum, a, b) emulated_dpbf16ps(sum, a, b)
#define _tile_dpbssd(sum, a, b) emulated_dpbs(sum, a, b, 1)
#define _tile_dpbsud(sum, a, b) emulated_dpbs(sum, a, b, 0)
