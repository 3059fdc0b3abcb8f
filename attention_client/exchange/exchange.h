/* Shared by lane.c and exchange.c. */
#ifndef EAAS_EXCHANGE_H
#define EAAS_EXCHANGE_H

#define _GNU_SOURCE
#include "../../eaas/minmax/arrays.h"
#include "../../eaas/wire/bell.h"
#include "../../eaas/wire/protocol.h"
#include "../dispatch/deadlines.h"
#include "../dispatch/route.h"

#define MOST_SLOTS 256
#define MOST_SERVERS 1024

typedef struct {
    PyObject_HEAD
    Py_buffer view;
    FlagLine *flags;
    BellLine *bells;
    const uint32_t *generations;
    char *slots_at;
    Py_ssize_t request_stride, result_stride, payload_capacity, result_capacity, reply_bell, doorbell, hidden;
    uint32_t generation;
    int32_t free[MOST_SLOTS];
    int32_t free_count;
    double work;                    /* in flight */
    double expected_s[SIZE_CLASSES]; /* of a request, by size class; 0: unknown */
    double tail;                    /* times that, after which a request is hedged; 0: never */
    Py_ssize_t abandoned;           /* requests that nobody waits for and the server has not answered */
    Py_ssize_t users;               /* exchanges that may touch the buffer */
    Py_ssize_t writers;             /* those that write a request now */
    SpinHistory spins;
    bool direct;   /* the server polls this very memory, and hears its doorbell */
    bool stopped;  /* no new request: the connection is lost or closed */
    bool released; /* drop the buffer with the last user */
} Lane;

extern PyType_Spec lane_spec;

/* A free slot, or -1. */
int32_t lane_pop(Lane *lane);
void lane_push(Lane *lane, int32_t slot);
/* Drop the buffer if it was released and nobody uses it. */
void lane_drop(Lane *lane);

#endif
