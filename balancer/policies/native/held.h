/* Rows of a layout: one byte per expert of a server. Rows are sparse: they are scanned eight bytes at a time, and the
 * experts found are listed once for later use. */
#ifndef EAAS_POLICIES_HELD_H
#define EAAS_POLICIES_HELD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the first byte is the lowest bit");

/* Packs eight bytes of 0 or 1 into eight bits: the multiplication gathers them in the highest byte. */
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

/* Lists a row's experts, ascending; returns their number. */
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

/* What each server of a layer holds. */
typedef struct {
    int32_t *expert; /* those of server 0, then those of server 1, ...; room for servers x experts */
    int32_t *first;  /* by server, and the end: where its experts begin in that list */
} HeldList;

/* Memory for the list, in one block. */
static inline size_t
list_bytes(ptrdiff_t servers, ptrdiff_t experts)
{
    return ((size_t)servers * (size_t)experts + (size_t)servers + 1) * sizeof(int32_t);
}

static inline HeldList
list_in(void *block, ptrdiff_t servers)
{
    return (HeldList){.first = block, .expert = (int32_t *)block + servers + 1};
}

static inline void
list_held(const uint8_t *holds, ptrdiff_t servers, ptrdiff_t experts, HeldList *list)
{
    int32_t found = 0;
    for (ptrdiff_t s = 0; s < servers; s++) {
        list->first[s] = found;
        found += list_row(holds + s * experts, experts, list->expert + found);
    }
    list->first[servers] = found;
}

static inline void
count_held(const HeldList *list, ptrdiff_t servers, ptrdiff_t experts, int64_t *count)
{
    memset(count, 0, (size_t)experts * sizeof(*count));
    for (int32_t i = 0; i < list->first[servers]; i++) {
        count[list->expert[i]]++;
    }
}

/* Whether the list's indices fit into its type. */
static inline bool
list_fits(ptrdiff_t servers, ptrdiff_t experts)
{
    return servers == 0 || experts <= INT32_MAX / servers;
}

#endif
