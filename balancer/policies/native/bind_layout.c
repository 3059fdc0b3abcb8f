/* Compact placements and layouts: one from the other, and loads of servers. For each function: checks, scratch memory, and a loop over layers. */
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
py_scatter_physical(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *o[4], *result = NULL;
    Py_ssize_t layers, experts, servers, replicas;
    if (!PyArg_ParseTuple(args, "OOnnnnOO", &o[0], &o[1], &layers, &experts, &servers, &replicas, &o[2], &o[3])) {
        return NULL;
    }
    Array a[4] = {0};
    Py_ssize_t cells = layers * servers * experts;
    if (!IN(0, "count", layers * experts, int64_t) || !IN(1, "expert", layers * replicas, int64_t)
        || !OUT(2, "holds", cells, uint8_t) || !OUT(3, "shares", cells, double)
        || !within(DATA(1), layers * replicas, 0, experts - 1, "expert")) {
        goto done;
    }
    if (servers < 1 || replicas % servers != 0) {
        PyErr_SetString(PyExc_ValueError, "servers: must divide the replicas");
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < layers * replicas; i++) {
        /* Servers count on from layer to layer, as the replicas do. */
        int64_t e = ((int64_t *)DATA(1))[i];
        Py_ssize_t at = i / (replicas / servers) * experts + e;
        ((uint8_t *)DATA(2))[at] = 1;
        ((double *)DATA(3))[at] += 1.0 / (double)((int64_t *)DATA(0))[i / replicas * experts + e];
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
    Py_ssize_t cells = layers * servers * experts;
    if (!IN(0, "load", layers * experts, double) || !IN(1, "holds", cells, uint8_t)
        || !IN(2, "shares", cells, double) || !OUT(3, "out", layers * servers, double)) {
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t row = 0; row < layers * servers; row++) {
        const double *load = (double *)DATA(0) + row / servers * experts;
        const uint8_t *holds = (uint8_t *)DATA(1) + row * experts;
        const double *shares = (double *)DATA(2) + row * experts;
        double sum = 0;
        Py_ssize_t e = 0;
        while (e < experts) {
            /* Few are held: eight at a time are passed by. */
            uint64_t eight;
            if (e + 8 <= experts && (memcpy(&eight, holds + e, 8), eight == 0)) {
                e += 8;
                continue;
            }
            Py_ssize_t end = e + 8 < experts ? e + 8 : experts;
            for (; e < end; e++) {
                sum += holds[e] ? load[e] * shares[e] : 0;
            }
        }
        ((double *)DATA(3))[row] = sum;
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
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
        || !OUT(4, "fits", layers, uint8_t)) {
        goto done;
    }
    count = malloc((size_t)experts * sizeof(*count) + 1);
    if (count == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t l = 0; l < layers; l++) {
        Layer layer = {experts, servers, (double *)DATA(0) + l * experts, NULL};
        const uint8_t *holds = (uint8_t *)DATA(1) + l * servers * experts;
        count_held(holds, servers, experts, count);
        const int64_t *slots = (int64_t *)DATA(2) + l * servers;
        bool fits = held_load(&layer, holds, count, slots, (double *)DATA(3) + l * servers);
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
    if (!IN(0, "holds", layers * cells, uint8_t) || !OUT(1, "shares", layers * cells, double)) {
        goto done;
    }
    count = malloc((size_t)experts * sizeof(*count) + 1);
    if (count == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t l = 0; l < layers; l++) {
        const uint8_t *holds = (uint8_t *)DATA(0) + l * cells;
        count_held(holds, servers, experts, count);
        equal_shares(holds, servers, experts, count, (double *)DATA(1) + l * cells);
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
