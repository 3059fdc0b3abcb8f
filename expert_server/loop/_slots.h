/* Python's object of the slots, and the layers that compiled code calls. */
#ifndef EXPERT_SERVER_SLOTS_OBJECT_H
#define EXPERT_SERVER_SLOTS_OBJECT_H

#include "../../eaas/minmax/arrays.h"
#include "slots.h"

enum { ARENA, BUSY, GENERATIONS, BELLS, CAPACITIES, BUFFERS };

typedef struct {
    PyObject_HEAD
    Slots slots;
    Array buffers[BUFFERS];
    PyObject *layers; /* list: a capsule of direct.h, or None */
    bool in_use;      /* without the GIL */
    bool closed;
    SpinHistory spins;
    bool leaving;     /* `serve` returns after the current request */
    double since;     /* what `serve` does: a batch of `doing` tokens since then, or 0 tokens: it waits */
    uint32_t doing;
} SlotsObject;

/* The kernel's layer for an accepted request, a new reference; NULL, without an exception: only Python can call the
 * kernel for it. */
PyObject *prepared_layer(const SlotsObject *self, Py_ssize_t slot);

PyObject *slots_serve(SlotsObject *self, PyObject *const *args, Py_ssize_t nargs);

#endif
