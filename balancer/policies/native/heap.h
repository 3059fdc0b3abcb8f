/* Entries in a heap, or sorted. */
#ifndef EAAS_POLICIES_HEAP_H
#define EAAS_POLICIES_HEAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The smallest key first; ties by the smallest item. */
typedef struct {
    double key;
    int32_t item;
} Entry;

static inline bool
before(Entry a, Entry b)
{
    /* Without branches, which would be mispredicted. */
    return (a.key < b.key) | ((a.key == b.key) & (a.item < b.item));
}

void sift_down(Entry *heap, ptrdiff_t size, ptrdiff_t at);
Entry pop(Entry *heap, ptrdiff_t *size);
/* Stable; `room` is scratch, as long as `entries`. */
void sort_entries(Entry *entries, Entry *room, ptrdiff_t size);

#endif
