/* Rows of a layout: what a server holds, an expert a byte. Few are held: eight are looked at at once, and what is found
 * is listed once for all that follows. */
#ifndef EAAS_POLICIES_HELD_H
#define EAAS_POLICIES_HELD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first byte is the lowest bit");

/* Eight bytes, each 0 or 1, as eight bits: the products that meet in the highest byte are one of each. */
#define BITS_OF_BYTES UINT64_C(0x0102040810204080)

/* The row's first `count` experts, 64 at most, a bit each. */
static inline uint64_t
held_bits(const uint8_t *row, ptrdiff_t count)
{
    uint64_t eight[8] = {0}, bits = 0;
    memcpy(eight, row, count < 64 ? (size_t)count : 64);
    for (int i = 0; i < 8; i++) {
        bits |= (eight[i] * BITS_OF_BYTES >> 56) << (8 * i);
    }
    return bits;
}

/* Lists what a row holds, ascending (room for all experts); returns how many. */
static inline int32_t
list_row(const uint8_t *row, ptrdiff_t experts, int32_t *listed)
{
    int32_t found = 0;
    for (ptrdiff_t at = 0; at < experts; at += 64) {
        for (uint64_t bits = held_bits(row + at, experts - at); bits != 0; bits &= bits - 1) {
            listed[found++] = (int32_t)at + __builtin_ctzll(bits);
        }
    }
    return found;
}

#endif
