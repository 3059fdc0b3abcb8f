/* A merge sort of keys. */
#include "keys.h"

#include <string.h>

#define RUN 8 /* shorter runs are sorted by insertion */

void
sort_keys(uint64_t *keys, uint64_t *room, ptrdiff_t size)
{
    for (ptrdiff_t start = 0; start < size; start += RUN) {
        ptrdiff_t end = start + RUN < size ? start + RUN : size;
        for (ptrdiff_t i = start + 1; i < end; i++) {
            uint64_t moved = keys[i];
            ptrdiff_t at = i;
            for (; at > start && moved < keys[at - 1]; at--) {
                keys[at] = keys[at - 1];
            }
            keys[at] = moved;
        }
    }
    for (ptrdiff_t width = RUN; width < size; width *= 2) {
        for (ptrdiff_t start = 0; start < size; start += 2 * width) {
            ptrdiff_t middle = start + width < size ? start + width : size;
            ptrdiff_t end = start + 2 * width < size ? start + 2 * width : size;
            ptrdiff_t left = start, right = middle, out = start;
            while (left < middle && right < end) {
                uint64_t one = keys[left], other = keys[right];
                ptrdiff_t later = other < one;
                room[out++] = later ? other : one;
                left += 1 - later;
                right += later;
            }
            memcpy(room + out, keys + left, (size_t)(middle - left) * sizeof(*keys));
            memcpy(room + out + (middle - left), keys + right, (size_t)(end - right) * sizeof(*keys));
        }
        memcpy(keys, room, (size_t)size * sizeof(*keys));
    }
}
