/* For the files that bind the loops to Python: arguments, and checks that the loops rely on. */
#ifndef EAAS_POLICIES_BIND_H
#define EAAS_POLICIES_BIND_H

#include "../../../eaas/minmax/arrays.h"

#include <stdlib.h>
#include <string.h>

#include "planning.h"

/* Of a function's arguments `o` and their buffers `a`. */
#define IN(i, name, count, type) open_array(&a[i], o[i], name, count, (Py_ssize_t)sizeof(type), false)
#define OUT(i, name, count, type) open_array(&a[i], o[i], name, count, (Py_ssize_t)sizeof(type), true)
#define DATA(i) (a[i].view.buf)

/* Each sets an exception if the answer is no. */
bool within(const int64_t *values, Py_ssize_t count, int64_t low, int64_t high, const char *name);
bool counts_fit(const int64_t *count, Py_ssize_t layers, Py_ssize_t experts, Py_ssize_t replicas);
bool servers_fit(const int32_t *server, Py_ssize_t size, Py_ssize_t servers);
bool list_fits(Py_ssize_t servers, Py_ssize_t experts);

/* Memory for the experts of all servers. */
static inline size_t
list_bytes(Py_ssize_t servers, Py_ssize_t experts)
{
    return ((size_t)servers * (size_t)experts + (size_t)servers + 1) * sizeof(int32_t);
}

static inline HeldList
list_in(void *block, Py_ssize_t servers)
{
    return (HeldList){.first = block, .expert = (int32_t *)block + servers + 1};
}

PyObject *py_replicate(PyObject *module, PyObject *args);
PyObject *py_pack(PyObject *module, PyObject *args);
PyObject *py_separate(PyObject *module, PyObject *args);
PyObject *py_place(PyObject *module, PyObject *args);
PyObject *py_refine(PyObject *module, PyObject *args);
PyObject *py_scatter(PyObject *module, PyObject *args);
PyObject *py_scatter_replicas(PyObject *module, PyObject *args);
PyObject *py_server_load(PyObject *module, PyObject *args);
PyObject *py_spread(PyObject *module, PyObject *args);
PyObject *py_swap_hottest(PyObject *module, PyObject *args);
PyObject *py_held_load(PyObject *module, PyObject *args);
PyObject *py_equal_shares(PyObject *module, PyObject *args);
PyObject *py_count_new(PyObject *module, PyObject *args);
PyObject *py_compact_load(PyObject *module, PyObject *args);
PyObject *py_match(PyObject *module, PyObject *args);
PyObject *py_replay(PyObject *module, PyObject *args);
PyObject *py_allocate(PyObject *module, PyObject *args);
PyObject *py_interleave(PyObject *module, PyObject *args);

#endif
