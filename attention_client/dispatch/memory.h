/* One block of memory for several arrays: laid out twice, without memory to count the bytes, and in the block. */
#ifndef EAAS_DISPATCH_MEMORY_H
#define EAAS_DISPATCH_MEMORY_H

#include <assert.h>
#include <stddef.h>

/* An array begins on a cache line, if the block does. */
#define ARRAY_BYTES 64

/* The next `count` items of the block; NULL without memory. */
static inline void *
take_array(char *memory, size_t *used, ptrdiff_t count, size_t item_bytes)
{
    assert(count >= 0);
    size_t at = *used;
    *used += ((size_t)count * item_bytes + ARRAY_BYTES - 1) / ARRAY_BYTES * ARRAY_BYTES;
    return memory == NULL ? NULL : memory + at;
}

#endif
