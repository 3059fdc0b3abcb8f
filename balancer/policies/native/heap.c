/* A binary heap of entries. */
#include "heap.h"

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
