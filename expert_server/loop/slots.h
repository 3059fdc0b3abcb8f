/* Answers requests in their slots, without Python between the header and the doorbell.
 *
 *     accept    the flag is WRITTEN, header copied once, copy validated          with the GIL
 *     answer    layer computed from the slot into the slot, result header,
 *               WRITTEN to DONE, reply bell                                      without the GIL
 *     serve     waits for a request, claims its slot, accepts and answers it, and waits for the next one,
 *               while each is the only one and plain
 *
 * It takes only plain requests, and has no errors to report: whatever is unusual about a request, the loop's
 * ordinary path finds it again and says so. Nothing has changed by then but the bytes of the result.
 *
 * The caller has claimed the slot, so that its bytes belong to one client until the release (slot_ownership.py). That
 * client may write to them at any time. So only the copy of the header is used, and ids are read once by the kernel.
 */
#ifndef EXPERT_SERVER_SLOTS_H
#define EXPERT_SERVER_SLOTS_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "../../eaas/wire/bell.h"
#include "../../eaas/wire/protocol.h"
#include "../../eaas/wire/spin.h"
#include "../kernels/direct.h"

/* An accepted request. */
typedef struct {
    RequestHeader header; /* the private copy */
    Py_ssize_t slot;
    PyObject *layer;      /* capsule; NULL: none is accepted */
    PayloadLayout layout;
} Request;

/* The owners of the slots, which `SlotTable` keeps; both sides change them under the GIL only. */
typedef struct {
    Py_buffer busy;        /* u8: the loop works on the slot, so it is not granted */
    Py_buffer generations; /* u64; 0: no owner */
    Py_buffer bells;       /* i32: the owner's doorbell */
    Py_buffer capacities;  /* u64, two for each slot: most bytes of the owner's payload and result */
} Owners;

/* What `serve` has done since its call. */
typedef struct {
    unsigned long long requests;
    double seconds, slowest;  /* slowest: seconds per token */
    Py_ssize_t slot;          /* of the last request */
    uint32_t layer, tokens;
    double began, ended;
} Served;

typedef struct {
    PyObject_HEAD
    Py_buffer view;
    Owners owners;
    FlagLine *flags;
    BellLine *bells;
    char *slots; /* the request header of slot 0 */
    Py_ssize_t count;
    size_t request_stride;
    size_t slot_stride;
    SlotLimits limits;
    PyObject *layers; /* list: a capsule of direct.h, or None */
    Request request;
    unsigned long long answered;
    bool in_use;         /* without the GIL */
    bool released;
    SpinHistory spins;
    bool leaving;        /* `serve` returns after the current request */
    double since;        /* what `serve` does: a batch of `doing` tokens since then, or 0 tokens: it waits */
    uint32_t doing;
} Direct;

static inline double
now_s(void)
{
    return (double)now_ns() * 1e-9;
}

/* answer.c */

/* Accept the request in a claimed slot: `self->request`, with a reference to its layer. */
bool accept_slot(Direct *self, Py_ssize_t slot, unsigned long long generation);
/* Answer the accepted request, without the GIL. False if the kernel cannot. */
bool answer_accepted(Direct *self, Py_ssize_t bell, double seen_at, double *ended);
void drop_buffers(Direct *self);

/* serve.c */
PyObject *direct_serve(Direct *self, PyObject *const *args, Py_ssize_t nargs);

#endif
