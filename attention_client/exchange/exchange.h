/* Shared by slots.c and exchange.c. */
#ifndef EAAS_EXCHANGE_H
#define EAAS_EXCHANGE_H

#define _GNU_SOURCE
#include "../../eaas/minmax/arrays.h"
#include "../dispatch/deadlines.h"
#include "../dispatch/route.h"
#include "slot.h"

#define MOST_SLOTS 256
#define MOST_SERVERS 1024
/* Larger requests are written without the GIL. */
#define BRIEF_BYTES (64 << 10)

typedef struct {
    PyObject_HEAD
    Py_buffer view;
    Grant grant;
    Doorbell *reply_doorbell, *doorbell;
    int32_t first, end; /* the granted slots */
    int32_t free_slots[MOST_SLOTS];
    int32_t free_count;
    double work;                    /* in flight */
    double expected_s[SIZE_CLASSES]; /* of a request, by size class; 0: unknown */
    double tail;                    /* times that, after which a request is hedged; 0: never */
    Py_ssize_t abandoned;           /* requests that nobody waits for and the server has not answered */
    Py_ssize_t users;               /* exchanges and verbs that may touch the buffer */
    Py_ssize_t writers;             /* exchanges that write a request now */
    SpinHistory spins;
    bool direct;   /* the server polls this very memory, and hears its doorbell */
    bool stopped;  /* no new request: the connection is lost or closed */
    bool released; /* drop the buffer with the last user */
} Slots;

extern PyType_Spec slots_spec;

/* A free slot, or -1. */
int32_t slots_pop(Slots *slots);
void slots_push(Slots *slots, int32_t slot);
/* Drop the buffer if it was released and nobody uses it. */
void slots_drop(Slots *slots);

#endif
