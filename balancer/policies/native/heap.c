/* A binary heap and a merge sort of entries. */
#include "heap.h"

#include <string.h>

#define RUN 8 /* shorter runs are sorted by insertion */

void
sift_down(Entry *heap, ptrdiff_t size, ptrdiff_t at)
{
    Entry moved = heap[at];
    for (;;) {
        ptrdiff_t child = 2 * at + 1;
        if (child >= size) {
            break;
        }
        if (child + 1 < size && before(heap[child + 1], heap[child])) {
            child++;
        }
        if (!before(heap[child], moved)) {
            break;
        }
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = moved;
}

Entry
pop(Entry *heap, ptrdiff_t *size)
{
    Entry top = heap[0];
    heap[0] = heap[--*size];
    if (*size > 1) {
        sift_down(heap, *size, 0);
    }
    return top;
}

void
sort_entries(Entry *entries, Entry *room, ptrdiff_t size)
{
    for (ptrdiff_t start = 0; start < size; start += RUN) {
        ptrdiff_t end = start + RUN < size ? start + RUN : size;
        for (ptrdiff_t i = start + 1; i < end; i++) {
            Entry moved = entries[i];
            ptrdiff_t at = i;
            for (; at > start && before(moved, entries[at - 1]); at--) {
                entries[at] = entries[at - 1];
            }
            entries[at] = moved;
        }
    }
    for (ptrdiff_t width = RUN; width < size; width *= 2) {
        for (ptrdiff_t start = 0; start < size; start += 2 * width) {
            ptrdiff_t middle = start + width < size ? start + width : size;
            ptrdiff_t end = start + 2 * width < size ? start + 2 * width : size;
            ptrdiff_t left = start, right = middle;
            for (ptrdiff_t out = start; out < end; out++) {
                bool take_left = right == end || (left < middle && !before(entries[right], entries[left]));
                room[out] = take_left ? entries[left++] : entries[right++];
            }
        }
        memcpy(entries, room, (size_t)size * sizeof(Entry));
    }
}
