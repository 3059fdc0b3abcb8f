/* Heaps and sorting of single numbers that carry what they are the key of in their lowest bits: compared without
 * branches, and no two are equal. The smallest is first. */
#ifndef EAAS_POLICIES_KEYS_H
#define EAAS_POLICIES_KEYS_H

#include <stddef.h>
#include <stdint.h>

/* Four children each: half the levels of two, and the four are in one cache line. */
static inline void
rise(uint64_t *heap, ptrdiff_t at, uint64_t key)
{
    while (at > 0 && key < heap[(at - 1) / 4]) {
        heap[at] = heap[(at - 1) / 4];
        at = (at - 1) / 4;
    }
    heap[at] = key;
}

/* The top gets another key. Down to a leaf without looking at it, then up: a server that has just got a replica
 * belongs near the end. */
static inline void
replace_top(uint64_t *heap, ptrdiff_t size, uint64_t key)
{
    ptrdiff_t at = 0, child = 1;
    for (; child + 3 < size; child = 4 * at + 1) {
        ptrdiff_t left = child + (heap[child + 1] < heap[child]), right = child + 2 + (heap[child + 3] < heap[child + 2]);
        child = heap[right] < heap[left] ? right : left;
        heap[at] = heap[child];
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

/* `room` is as long as `keys`. */
void sort_keys(uint64_t *keys, uint64_t *room, ptrdiff_t size);

#endif
