/* Binds compact placements, layouts and server loads. Each function: checks, scratch memory, and a loop over layers. */
#include "bind.h"

PyObject *
py_scatter(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *o[4], *result = NULL;
    Py_ssize_t layers, experts, servers, replicas;
    if (!PyArg_ParseTuple(args, "OOnnnnOO", &o[0], &o[1], &layers, &experts, &servers, &replicas, &o[2], &o[3])) {
        return NULL;
    }
    Array a[4] = {0};
    Py_ssize_t cells = layers * servers * experts;
    if (!IN(0, "count", layers * experts, int64_t) || !IN(1, "server", layers * replicas, int32_t)
        || !OUT(2, "holds", cells, uint8_t) || (o[3] != Py_None && !OUT(3, "shares", cells, double))
        || !counts_fit(DATA(0), layers, experts, replicas)
        || !servers_fit(DATA(1), layers * replicas, servers)) {
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t l = 0; l < layers; l++) {
        const int64_t *count = (int64_t *)DATA(0) + l * experts;
        const int32_t *server = (int32_t *)DATA(1) + l * replicas;
        uint8_t *holds = (uint8_t *)DATA(2) + l * servers * experts;
        double *shares = DATA(3) == NULL ? NULL : (double *)DATA(3) + l * servers * experts;
        for (Py_ssize_t e = 0; e < experts; server += count[e], e++) {
            int64_t placed = 0;
            for (int64_t i = 0; i < count[e]; i++) {
                placed += server[i] >= 0;
            }
            for (int64_t i = 0; i < count[e]; i++) {
                if (server[i] < 0) {
                    continue;
                }
                holds[server[i] * experts + e] = 1;
                if (shares != NULL) {
                    shares[server[i] * experts + e] = 1.0 / (double)placed;
                }
            }
        }
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    close_arrays(a, COUNT_OF(a));
    return result;
}

PyObject *
py_scatter_replicas(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *o[5], *result = NULL;
    Py_ssize_t layers, experts, servers, replicas;
    if (!PyArg_ParseTuple(args, "OOOnnnnOO", &o[0], &o[1], &o[2], &layers, &experts, &servers, &replicas, &o[3],
                          &o[4])) {
        return NULL;
    }
    Array a[5] = {0};
    Py_ssize_t cells = layers * servers * experts, size = layers * replicas;
    if (!IN(0, "count", layers * experts, int64_t) || !IN(1, "expert", size, int64_t)
        || !IN(2, "server", size, int64_t) || !OUT(3, "holds", cells, uint8_t) || !OUT(4, "shares", cells, double)
        || !within(DATA(1), size, 0, experts - 1, "expert") || !within(DATA(2), size, 0, servers - 1, "server")) {
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < size; i++) {
        Py_ssize_t l = i / replicas;
        int64_t e = ((int64_t *)DATA(1))[i];
        Py_ssize_t at = (l * servers + ((int64_t *)DATA(2))[i]) * experts + e;
        ((uint8_t *)DATA(3))[at] = 1;
        ((double *)DATA(4))[at] += 1.0 / (double)((int64_t *)DATA(0))[l * experts + e];
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    close_arrays(a, COUNT_OF(a));
    return result;
}

PyObject *
py_server_load(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *o[4], *result = NULL;
    Py_ssize_t layers, servers, experts;
    if (!PyArg_ParseTuple(args, "OOOnnnO", &o[0], &o[1], &o[2], &layers, &servers, &experts, &o[3])) {
        return NULL;
    }
    Array a[4] = {0};
    void *room = NULL;
    Py_ssize_t cells = servers * experts;
    if (!IN(0, "load", layers * experts, double) || !IN(1, "holds", layers * cells, uint8_t)
        || !IN(2, "shares", layers * cells, double) || !OUT(3, "out", layers * servers, double)
        || !list_fits(servers, experts)) {
        goto done;
    }
    room = malloc(list_bytes(servers, experts));
    if (room == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    HeldList list = list_in(room, servers);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t l = 0; l < layers; l++) {
        Layer layer = {experts, servers, (double *)DATA(0) + l * experts, NULL};
        list_held((uint8_t *)DATA(1) + l * cells, servers, experts, &list);
        server_load(&layer, &list, (double *)DATA(2) + l * cells, (double *)DATA(3) + l * servers);
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    free(room);
    close_arrays(a, COUNT_OF(a));
    return result;
}

PyObject *
py_held_load(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *o[5], *result = NULL;
    Py_ssize_t layers, servers, experts;
    if (!PyArg_ParseTuple(args, "OOOnnnOO", &o[0], &o[1], &o[2], &layers, &servers, &experts, &o[3], &o[4])) {
        return NULL;
    }
    Array a[5] = {0};
    int64_t *count = NULL;
    if (!IN(0, "load", layers * experts, double) || !IN(1, "holds", layers * servers * experts, uint8_t)
        || !IN(2, "slots", layers * servers, int64_t) || !OUT(3, "out", layers * servers, double)
        || !OUT(4, "fits", layers, uint8_t) || !list_fits(servers, experts)) {
        goto done;
    }
    count = malloc((size_t)experts * sizeof(*count) + list_bytes(servers, experts));
    if (count == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    HeldList list = list_in(count + experts, servers);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t l = 0; l < layers; l++) {
        Layer layer = {experts, servers, (double *)DATA(0) + l * experts, NULL};
        const uint8_t *holds = (uint8_t *)DATA(1) + l * servers * experts;
        list_held(holds, servers, experts, &list);
        count_held(&list, servers, experts, count);
        const int64_t *slots = (int64_t *)DATA(2) + l * servers;
        bool fits = held_load(&layer, &list, count, slots, (double *)DATA(3) + l * servers);
        for (Py_ssize_t e = 0; e < experts; e++) {
            fits &= count[e] > 0;
        }
        ((uint8_t *)DATA(4))[l] = fits;
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    free(count);
    close_arrays(a, COUNT_OF(a));
    return result;
}

PyObject *
py_equal_shares(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *o[2], *result = NULL;
    Py_ssize_t layers, servers, experts;
    if (!PyArg_ParseTuple(args, "OnnnO", &o[0], &layers, &servers, &experts, &o[1])) {
        return NULL;
    }
    Array a[2] = {0};
    int64_t *count = NULL;
    Py_ssize_t cells = servers * experts;
    if (!IN(0, "holds", layers * cells, uint8_t) || !OUT(1, "shares", layers * cells, double)
        || !list_fits(servers, experts)) {
        goto done;
    }
    count = malloc((size_t)experts * sizeof(*count) + list_bytes(servers, experts));
    if (count == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    HeldList list = list_in(count + experts, servers);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t l = 0; l < layers; l++) {
        list_held((uint8_t *)DATA(0) + l * cells, servers, experts, &list);
        count_held(&list, servers, experts, count);
        equal_shares(&list, servers, experts, count, (double *)DATA(1) + l * cells);
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    free(count);
    close_arrays(a, COUNT_OF(a));
    return result;
}

PyObject *
py_compact_load(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *o[4], *result = NULL;
    Py_ssize_t layers, servers, experts, replicas;
    if (!PyArg_ParseTuple(args, "OOOnnnnO", &o[0], &o[1], &o[2], &layers, &servers, &experts, &replicas, &o[3])) {
        return NULL;
    }
    Array a[4] = {0};
    if (!IN(0, "load", layers * experts, double) || !IN(1, "count", layers * experts, int64_t)
        || !IN(2, "server", layers * replicas, int32_t) || !OUT(3, "out", layers * servers, double)
        || !counts_fit(DATA(1), layers, experts, replicas) || !servers_fit(DATA(2), layers * replicas, servers)) {
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    memset(DATA(3), 0, (size_t)(layers * servers) * sizeof(double));
    for (Py_ssize_t l = 0; l < layers; l++) {
        const int64_t *count = (int64_t *)DATA(1) + l * experts;
        const int32_t *server = (int32_t *)DATA(2) + l * replicas;
        for (Py_ssize_t e = 0; e < experts; server += count[e], e++) {
            int64_t placed = 0;
            for (int64_t i = 0; i < count[e]; i++) {
                placed += server[i] >= 0;
            }
            double part = ((double *)DATA(0))[l * experts + e] / (double)placed;
            for (int64_t i = 0; i < count[e]; i++) {
                if (server[i] >= 0) {
                    ((double *)DATA(3))[l * servers + server[i]] += part;
                }
            }
        }
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    close_arrays(a, COUNT_OF(a));
    return result;
}

PyObject *
py_count_new(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *o[2], *result = NULL;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "OOn", &o[0], &o[1], &size)) {
        return NULL;
    }
    Array a[2] = {0};
    if (IN(0, "holds", size, uint8_t) && IN(1, "current", size, uint8_t)) {
        long long found;
        Py_BEGIN_ALLOW_THREADS
        found = count_new(DATA(0), DATA(1), size);
        Py_END_ALLOW_THREADS
        result = PyLong_FromLongLong(found);
    }
    close_arrays(a, COUNT_OF(a));
    return result;
}
