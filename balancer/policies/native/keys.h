/* Heaps and sorting of keys that carry their item, an expert or a server, in the lowest bits: compared without branches,
 * and no two are equal. The smallest is first. */
#ifndef EAAS_POLICIES_KEYS_H
#define EAAS_POLICIES_KEYS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MOST_ITEMS 0x10000
#define ITEM_BITS UINT64_C(0xffff)

/* The lowest value first, then the lowest item. The bits of non-negative doubles sort like the numbers. Differences
 * below 1e-11 are ignored, those of single precision are not. */
static inline uint64_t
key_of(double value, ptrdiff_t item)
{
    uint64_t bits;
    value = value > 0 ? value : 0; /* -0, and rounded rests below 0, have other bits. */
    memcpy(&bits, &value, sizeof(bits));
    return (bits & ~ITEM_BITS) | (uint64_t)item;
}

/* The highest value first, then the lowest item. */
static inline uint64_t
falling_key(double value, ptrdiff_t item)
{
    return key_of(value, item) ^ ~ITEM_BITS;
}

static inline int32_t
item_of(uint64_t key)
{
    return (int32_t)(key & ITEM_BITS);
}

/* Four children: half the levels of a binary heap, and the four share a cache line. */
static inline void
rise(uint64_t *heap, ptrdiff_t at, uint64_t key)
{
    while (at > 0 && key < heap[(at - 1) / 4]) {
        heap[at] = heap[(at - 1) / 4];
        at = (at - 1) / 4;
    }
    heap[at] = key;
}

/* Replaces the top's key: down to a leaf without comparing the key, then up, as a server that just got a replica
 * belongs near the end. */
static inline void
replace_top(uint64_t *heap, ptrdiff_t size, uint64_t key)
{
    ptrdiff_t at = 0, child = 1;
    for (; child + 3 < size; child = 4 * at + 1) {
        uint64_t a = heap[child], b = heap[child + 1], c = heap[child + 2], d = heap[child + 3];
        uint64_t first = b < a ? b : a, second = d < c ? d : c;
        ptrdiff_t left = child + (b < a), right = child + 2 + (d < c);
        /* Masked: a branch here would be mispredicted. */
        child = left ^ ((left ^ right) & -(ptrdiff_t)(second < first));
        heap[at] = second < first ? second : first;
        at = child;
    }
    if (child < size) {
        ptrdiff_t least = child;
        for (child++; child < size; child++) {
            least = heap[child] < heap[least] ? child : least;
        }
        heap[at] = heap[least];
        at = least;
    }
    rise(heap, at, key);
}

static inline void
drop_top(uint64_t *heap, ptrdiff_t *size)
{
    --*size;
    replace_top(heap, *size, heap[*size]);
}

/* `room` is scratch, as long as `keys`. */
void sort_keys(uint64_t *keys, uint64_t *room, ptrdiff_t size);

#endif
