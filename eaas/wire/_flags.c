/* Flags of slots with acquire/release order, and waits that spin and then sleep.
 *
 * Python does not order stores to shared memory, and a Python polling loop starves the other threads of its
 * process. So flags and doorbells are compiled; their meaning is not known here.
 *
 * doorbell.h has the flags, the doorbells and the waits; here they are put into a Python class.
 */
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#include "doorbell.h"

#define MAX_TIMEOUT_US INT64_C(1000000000000000) /* 31 years; its nanoseconds fit in 64 bits. */

/* ---- the Python class ----------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Py_buffer view;
    FlagLine *flags;
    Doorbell *doorbells;
    Py_ssize_t count;
    Py_ssize_t doorbell_count;
    Py_ssize_t waiting; /* threads inside wait(); they run without the GIL and use the buffer */
    SpinHistory spins; /* of waits with a bounded spin */
    bool released;
} Flags;

static void
drop_buffer(Flags *self)
{
    if (self->view.obj != NULL) {
        PyBuffer_Release(&self->view);
        self->view.obj = NULL;
    }
}

static bool
is_open(const Flags *self)
{
    if (self->released) {
        PyErr_SetString(PyExc_ValueError, "the flags were released");
        return false;
    }
    return true;
}

/* Find `count` lines at `offset`, or set ValueError and return NULL. */
static void *
lines_at(const Py_buffer *view, Py_ssize_t offset, Py_ssize_t count, const char *what)
{
    if (offset < 0 || count < 1 || offset > view->len || count > (view->len - offset) / LINE_BYTES) {
        PyErr_Format(PyExc_ValueError, "%zd %s at offset %zd do not lie in a buffer of %zd bytes", count,
                     what, offset, view->len);
        return NULL;
    }
    char *lines = (char *)view->buf + offset;
    if ((uintptr_t)lines % LINE_BYTES != 0) {
        PyErr_Format(PyExc_ValueError, "the %s at offset %zd are not aligned to 64 bytes", what, offset);
        return NULL;
    }
    return lines;
}

static PyObject *
flags_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer", "flags_offset", "count", "doorbells_offset", "doorbells", NULL};
    PyObject *buffer;
    Py_ssize_t flags_offset;
    Py_ssize_t count;
    Py_ssize_t doorbells_offset;
    Py_ssize_t doorbell_count;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Onnnn:Flags", names, &buffer, &flags_offset, &count,
                                     &doorbells_offset, &doorbell_count)) {
        return NULL;
    }
    Flags *self = (Flags *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    if (PyObject_GetBuffer(buffer, &self->view, PyBUF_WRITABLE) < 0) {
        self->view.obj = NULL;
        Py_DECREF(self);
        return NULL;
    }
    self->count = count;
    self->doorbell_count = doorbell_count;
    self->flags = lines_at(&self->view, flags_offset, count, "flags");
    if (self->flags == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    self->doorbells = lines_at(&self->view, doorbells_offset, doorbell_count, "doorbells");
    if (self->doorbells == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void
flags_dealloc(Flags *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    drop_buffer(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* -- arguments: each function returns false with an exception set -- */

static bool
check_arity(const char *name, Py_ssize_t given, Py_ssize_t wanted)
{
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments, %zd given", name, wanted, given);
        return false;
    }
    return true;
}

static bool
check_range(Py_ssize_t first, Py_ssize_t count, Py_ssize_t limit, const char *what)
{
    if (first < 0 || count < 0 || first > limit || count > limit - first) {
        PyErr_Format(PyExc_IndexError, "%s %zd (+%zd) of %zd", what, first, count, limit);
        return false;
    }
    return true;
}

static bool
parse_size(PyObject *object, Py_ssize_t *size)
{
    *size = PyNumber_AsSsize_t(object, PyExc_IndexError);
    return *size != -1 || !PyErr_Occurred();
}

/* Find a flag or a doorbell; NULL with an exception set. */

static FlagLine *
flag_at(const Flags *self, PyObject *index)
{
    Py_ssize_t i;
    bool found = is_open(self) && parse_size(index, &i) && check_range(i, 1, self->count, "flag");
    return found ? &self->flags[i] : NULL;
}

static Doorbell *
doorbell_at(const Flags *self, PyObject *index)
{
    Py_ssize_t i;
    bool found = is_open(self) && parse_size(index, &i) && check_range(i, 1, self->doorbell_count, "doorbell");
    return found ? &self->doorbells[i] : NULL;
}

static bool
parse_limited(PyObject *object, long long limit, const char *what, uint32_t *number)
{
    long long value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) {
        return false;
    }
    if (value < 0 || value > limit) {
        PyErr_Format(PyExc_ValueError, "%s must be in 0..%lld", what, limit);
        return false;
    }
    *number = (uint32_t)value;
    return true;
}

/* -- methods -- */

static PyObject *
flags_load(Flags *self, PyObject *index)
{
    FlagLine *flag = flag_at(self, index);
    return flag == NULL ? NULL : PyLong_FromUnsignedLong(__atomic_load_n(&flag->value, __ATOMIC_ACQUIRE));
}

static PyObject *
flags_exchange(Flags *self, PyObject *const *args, Py_ssize_t nargs)
{
    FlagLine *flag;
    uint32_t value;
    if (!check_arity("exchange", nargs, 2) || (flag = flag_at(self, args[0])) == NULL ||
        !parse_limited(args[1], MAX_VALUE, "a flag's value", &value)) {
        return NULL;
    }
    return PyLong_FromUnsignedLong(__atomic_exchange_n(&flag->value, value, __ATOMIC_SEQ_CST));
}

static PyObject *
flags_compare_exchange(Flags *self, PyObject *const *args, Py_ssize_t nargs)
{
    FlagLine *flag;
    uint32_t expected;
    uint32_t value;
    if (!check_arity("compare_exchange", nargs, 3) || (flag = flag_at(self, args[0])) == NULL ||
        !parse_limited(args[1], MAX_VALUE, "a flag's value", &expected) ||
        !parse_limited(args[2], MAX_VALUE, "a flag's value", &value)) {
        return NULL;
    }
    bool swapped = __atomic_compare_exchange_n(&flag->value, &expected, value, false, __ATOMIC_ACQ_REL,
                                               __ATOMIC_ACQUIRE);
    return PyBool_FromLong(swapped);
}

static PyObject *
flags_ring(Flags *self, PyObject *index)
{
    Doorbell *doorbell = doorbell_at(self, index);
    if (doorbell == NULL) {
        return NULL;
    }
    ring_doorbell(doorbell);
    Py_RETURN_NONE;
}

static PyObject *
flags_interrupt(Flags *self, PyObject *index)
{
    Doorbell *doorbell = doorbell_at(self, index);
    if (doorbell == NULL) {
        return NULL;
    }
    bump_and_wake(doorbell);
    Py_RETURN_NONE;
}

static PyObject *
flags_seq(Flags *self, PyObject *index)
{
    Doorbell *doorbell = doorbell_at(self, index);
    return doorbell == NULL ? NULL : PyLong_FromUnsignedLong(__atomic_load_n(&doorbell->seq, __ATOMIC_ACQUIRE));
}

static PyObject *
list_ready(const Flags *self, Py_ssize_t first, Py_ssize_t count, uint32_t mask)
{
    PyObject *ready = PyList_New(0);
    if (ready == NULL) {
        return NULL;
    }
    for (Py_ssize_t i = first; i < first + count; i++) {
        if (!flag_matches(&self->flags[i], mask)) {
            continue;
        }
        PyObject *index = PyLong_FromSsize_t(i);
        if (index == NULL || PyList_Append(ready, index) < 0) {
            Py_XDECREF(index);
            Py_DECREF(ready);
            return NULL;
        }
        Py_DECREF(index);
    }
    return ready;
}

static PyObject *
flags_scan(Flags *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t first;
    Py_ssize_t count;
    uint32_t mask;
    if (!is_open(self) || !check_arity("scan", nargs, 3) || !parse_size(args[0], &first) ||
        !parse_size(args[1], &count) || !check_range(first, count, self->count, "flags") ||
        !parse_limited(args[2], UINT32_MAX, "a mask", &mask)) {
        return NULL;
    }
    return list_ready(self, first, count, mask);
}

/* One slice without the GIL. Returns false with an exception set: a signal's, or that of is_open. */
static bool
wait_without_gil(Flags *self, const Wait *wait, Outcome *outcome)
{
    self->waiting++;
    Py_BEGIN_ALLOW_THREADS
    *outcome = wait_slice(wait);
    Py_END_ALLOW_THREADS
    self->waiting--;
    if (self->released && self->waiting == 0) {
        drop_buffer(self);
    }
    if (PyErr_CheckSignals() < 0) {
        return false;
    }
    return is_open(self); /* A signal's handler may have released it, too. */
}

static PyObject *
flags_wait(Flags *self, PyObject *args)
{
    Py_ssize_t first;
    Py_ssize_t count;
    PyObject *mask_object;
    Py_ssize_t doorbell;
    long long seen_seq;
    long long spin_us;
    long long timeout_us;
    uint32_t mask;
    if (!is_open(self) ||
        !PyArg_ParseTuple(args, "nnOnLLL:wait", &first, &count, &mask_object, &doorbell, &seen_seq, &spin_us,
                          &timeout_us) ||
        !check_range(first, count, self->count, "flags") ||
        !check_range(doorbell, 1, self->doorbell_count, "doorbell") ||
        !parse_limited(mask_object, UINT32_MAX, "a mask", &mask)) {
        return NULL;
    }
    if (timeout_us < 0 || timeout_us > MAX_TIMEOUT_US || seen_seq > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "timeout_us or seen_seq is out of range");
        return NULL;
    }
    bool adapt = spin_us > 0 && spin_us <= timeout_us && spin_us <= MAX_TIMEOUT_US / SPIN_STRETCH;
    if (spin_us < 0 || spin_us > timeout_us) {
        spin_us = timeout_us;
    }
    uint64_t start = now_ns();
    uint64_t asked_ns = (uint64_t)spin_us * 1000;
    uint64_t spin_ns = adapt ? spin_for(&self->spins, asked_ns) : asked_ns;
    Wait wait = {
        .flags = &self->flags[first],
        .count = count,
        .mask = mask,
        .doorbell = &self->doorbells[doorbell],
        .seen_seq = seen_seq,
        .spin_until_ns = start + spin_ns,
        .deadline_ns = start + (uint64_t)timeout_us * 1000,
    };
    Outcome outcome = doorbell_rung(&wait) ? WAIT_RUNG : WAIT_INTERRUPTED;
    for (;;) {
        /* Scan again after WAIT_READY: flags may have changed while waiting for the GIL. */
        PyObject *ready = list_ready(self, first, count, mask);
        if (ready == NULL || PyList_Size(ready) > 0) {
            return ready;
        }
        if (outcome == WAIT_RUNG || outcome == WAIT_EXPIRED) {
            return ready;
        }
        Py_DECREF(ready);
        if (!wait_without_gil(self, &wait, &outcome)) {
            return NULL;
        }
        if (adapt && outcome != WAIT_INTERRUPTED) {
            learn_spin(&self->spins, now_ns() - start, spin_ns, asked_ns);
        }
    }
}

/* Order earlier loads before later ones: implied on x86, not on AArch64. */
static PyObject *
flags_fence(Flags *Py_UNUSED(self), PyObject *Py_UNUSED(ignored))
{
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    Py_RETURN_NONE;
}

static PyObject *
flags_release(Flags *self, PyObject *Py_UNUSED(ignored))
{
    self->released = true;
    if (self->waiting == 0) {
        drop_buffer(self);
    }
    Py_RETURN_NONE;
}

#define FAST(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef flags_methods[] = {
    {"load", (PyCFunction)flags_load, METH_O, "load(i) -> int: the flag's value (acquire)"},
    {"exchange", FAST(flags_exchange), METH_FASTCALL, "exchange(i, value) -> int: set it, return the old value"},
    {"compare_exchange", FAST(flags_compare_exchange), METH_FASTCALL,
     "compare_exchange(i, expect, value) -> bool: set it if it is `expect` (release)"},
    {"ring", (PyCFunction)flags_ring, METH_O, "ring(doorbell): wake sleepers, after setting a flag"},
    {"interrupt", (PyCFunction)flags_interrupt, METH_O, "interrupt(doorbell): wake all, and change seq"},
    {"seq", (PyCFunction)flags_seq, METH_O, "seq(doorbell) -> int: changes with each interrupt"},
    {"scan", FAST(flags_scan), METH_FASTCALL, "scan(first, count, mask) -> list of ready indices"},
    {"wait", (PyCFunction)flags_wait, METH_VARARGS,
     "wait(first, count, mask, doorbell, seen_seq, spin_us, timeout_us) -> list of ready indices"},
    {"fence", (PyCFunction)flags_fence, METH_NOARGS, "fence(): acquire fence"},
    {"release", (PyCFunction)flags_release, METH_NOARGS, "release(): drop the buffer"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot flags_slots[] = {
    {Py_tp_new, flags_new},
    {Py_tp_dealloc, flags_dealloc},
    {Py_tp_methods, flags_methods},
    {Py_tp_doc, "Flags(buffer, flags_offset, count, doorbells_offset, doorbells): see _flags.pyi"},
    {0, NULL},
};

static PyType_Spec flags_spec = {
    .name = "eaas.wire._flags.Flags",
    .basicsize = sizeof(Flags),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = flags_slots,
};

static int
module_exec(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &flags_spec, NULL);
    if (type == NULL) {
        return -1;
    }
    int result = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return result < 0 ? -1 : PyModule_AddIntConstant(module, "LINE_BYTES", LINE_BYTES);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_flags",
    .m_doc = "The flag primitive of the slots.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__flags(void)
{
    return PyModuleDef_Init(&module_definition);
}
