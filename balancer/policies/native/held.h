/* Rows of a layout: what a server holds, an expert a byte. */
#ifndef EAAS_POLICIES_HELD_H
#define EAAS_POLICIES_HELD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* What is held of the row from `at` on: the next index, or `experts`. Few are held: eight are passed at a time. */
static inline ptrdiff_t
next_held(const uint8_t *row, ptrdiff_t at, ptrdiff_t experts)
{
    uint64_t eight;
    while (at + 8 <= experts && (memcpy(&eight, row + at, 8), eight == 0)) {
        at += 8;
    }
    while (at < experts && !row[at]) {
        at++;
    }
    return at;
}

#endif
