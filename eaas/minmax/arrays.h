/* Array arguments: contiguous buffers with checked lengths. */
#ifndef EAAS_MINMAX_ARRAYS_H
#define EAAS_MINMAX_ARRAYS_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stddef.h>

typedef struct {
    Py_buffer view;
    bool open;
} Array;

/* Open a contiguous buffer of items of `size` bytes, or set an exception. */
static inline bool
open_items(Array *array, PyObject *object, const char *name, Py_ssize_t size, bool writable)
{
    int flags = PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, &array->view, flags) < 0) {
        return false;
    }
    array->open = true;
    if (array->view.itemsize != size) {
        PyErr_Format(PyExc_ValueError, "%s: %zd bytes in items of %zd, wanted items of %zd", name, array->view.len,
                     array->view.itemsize, size);
        return false;
    }
    return true;
}

/* The same with exactly `count` items. */
static inline bool
open_array(Array *array, PyObject *object, const char *name, Py_ssize_t count, Py_ssize_t size, bool writable)
{
    if (!open_items(array, object, name, size, writable)) {
        return false;
    }
    if (count < 0 || array->view.len != count * size) {
        PyErr_Format(PyExc_ValueError, "%s: %zd bytes in items of %zd, wanted %zd items", name, array->view.len, size,
                     count);
        return false;
    }
    return true;
}

static inline void
close_arrays(Array *arrays, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (arrays[i].open) {
            PyBuffer_Release(&arrays[i].view);
        }
    }
}

#define COUNT_OF(arrays) (sizeof(arrays) / sizeof((arrays)[0]))

#endif
