/* What Python sees of the planning loops: checks, scratch memory, and a loop over layers in each function. */
#include "arrays.h"

#include <stdlib.h>
#include <string.h>

#include "planning.h"

#define IN(i, name, count, type) open_array(&a[i], o[i], name, count, (Py_ssize_t)sizeof(type), false)
#define OUT(i, name, count, type) open_array(&a[i], o[i], name, count, (Py_ssize_t)sizeof(type), true)
#define DATA(i) (a[i].view.buf)

/* Whether all numbers are in [low, high]; sets an exception if not. */
static bool
within(const int64_t *values, Py_ssize_t count, int64_t low, int64_t high, const char *name)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        if (values[i] < low || values[i] > high) {
            PyErr_Format(PyExc_ValueError, "%s: %lld is out of range", name, (long long)values[i]);
            return false;
        }
    }
    return true;
}

/* Whether the counts of each layer are above 0 and sum to `replicas` at most. */
static bool
counts_fit(const int64_t *count, Py_ssize_t layers, Py_ssize_t experts, Py_ssize_t replicas)
{
    for (Py_ssize_t l = 0; l < layers; l++) {
        int64_t sum = 0;
        for (Py_ssize_t e = 0; e < experts; e++) {
            int64_t one = count[l * experts + e];
            if (one < 1 || one > replicas || (sum += one) > replicas) {
                PyErr_SetString(PyExc_ValueError, "count: does not fit the replicas");
                return false;
            }
        }
    }
    return true;
}

static bool
servers_fit(const int32_t *server, Py_ssize_t size, Py_ssize_t servers)
{
    for (Py_ssize_t i = 0; i < size; i++) {
        if (server[i] < -1 || server[i] >= servers) {
            PyErr_SetString(PyExc_IndexError, "server: out of range");
            return false;
        }
    }
    return true;
}

static PyObject *
py_replicate(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *o[4], *result = NULL;
    Py_ssize_t layers, experts, width;
    long long cap;
    int single;
    if (!PyArg_ParseTuple(args, "OOnnLpOOn", &o[0], &o[1], &layers, &experts, &cap, &single, &o[2], &o[3], &width)) {
        return NULL;
    }
    Array a[4] = {0};
    Entry *heap = NULL;
    if (!IN(0, "load", layers * experts, double) || !IN(1, "extra", layers, int64_t)
        || !OUT(2, "count", layers * experts, int64_t) || !OUT(3, "picks", layers * width, int64_t)
        || !within(DATA(1), layers, 0, width > 0 ? width : INT64_MAX, "extra")) {
        goto done;
    }
    heap = malloc((size_t)experts * sizeof(*heap) + 1);
    if (heap == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    const int64_t *extra = DATA(1);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t l = 0; l < layers; l++) {
        replicate((double *)DATA(0) + l * experts, experts, extra[l], cap, single, (int64_t *)DATA(2) + l * experts,
                  width > 0 ? (int64_t *)DATA(3) + l * width : NULL, heap);
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    free(heap);
    close_arrays(a, COUNT_OF(a));
    return result;
}

static PyObject *
py_pack(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *o[4], *result = NULL;
    Py_ssize_t layers, replicas, servers;
    int single;
    if (!PyArg_ParseTuple(args, "OOnnnpOO", &o[0], &o[1], &layers, &replicas, &servers, &single, &o[2], &o[3])) {
        return NULL;
    }
    Array a[4] = {0};
    double *filled = NULL;
    Py_ssize_t size = layers * replicas;
    if (!IN(0, "value", size, double) || !IN(1, "order", size, int64_t) || !OUT(2, "server", size, int64_t)
        || !OUT(3, "place", size, int64_t) || !within(DATA(1), size, 0, replicas - 1, "order")) {
        goto done;
    }
    if (servers < 1 || replicas % servers != 0) {
        PyErr_SetString(PyExc_ValueError, "servers: must divide the replicas");
        goto done;
    }
    size_t n = (size_t)servers;
    filled = malloc(n * (sizeof(double) + sizeof(int64_t) + sizeof(Entry)));
    if (filled == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    int64_t *held = (int64_t *)(filled + n);
    Entry *heap = (Entry *)(held + n);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < size; at += replicas) {
        pack(servers, (double *)DATA(0) + at, (int64_t *)DATA(1) + at, replicas, replicas / servers, single,
             (int64_t *)DATA(2) + at, (int64_t *)DATA(3) + at, filled, held, heap);
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    free(filled);
    close_arrays(a, COUNT_OF(a));
    return result;
}

static PyObject *
py_separate(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *o[4], *result = NULL;
    Py_ssize_t layers, replicas, servers, experts;
    if (!PyArg_ParseTuple(args, "OOnnnnOO", &o[0], &o[1], &layers, &replicas, &servers, &experts, &o[2], &o[3])) {
        return NULL;
    }
    Array a[4] = {0};
    uint16_t *held = NULL;
    Py_ssize_t size = layers * replicas;
    if (!IN(0, "value", size, double) || !IN(1, "expert", size, int64_t) || !OUT(2, "server", size, int64_t)
        || !OUT(3, "place", size, int64_t) || !within(DATA(1), size, 0, experts - 1, "expert")
        || !within(DATA(2), size, 0, servers - 1, "server")) {
        goto done;
    }
    held = malloc((size_t)servers * (size_t)experts * sizeof(*held) + 1);
    if (held == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < size; at += replicas) {
        separate(replicas, servers, experts, (double *)DATA(0) + at, (int64_t *)DATA(1) + at,
                 (int64_t *)DATA(2) + at, (int64_t *)DATA(3) + at, held);
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    free(held);
    close_arrays(a, COUNT_OF(a));
    return result;
}

static PyObject *
py_place(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *o[5], *result = NULL;
    Py_ssize_t plans, layers, experts, servers, replicas;
    if (!PyArg_ParseTuple(args, "OOOOnnnnnO", &o[0], &o[1], &o[2], &o[3], &plans, &layers, &experts, &servers, &replicas,
                          &o[4])) {
        return NULL;
    }
    Array a[5] = {0};
    char *memory = NULL;
    if (!IN(0, "load", layers * experts, double) || !IN(1, "count", plans * layers * experts, int64_t)
        || !IN(2, "slots", plans * layers * servers, int64_t) || !IN(3, "speed", servers, double)
        || !OUT(4, "server", plans * layers * replicas, int32_t)
        || !counts_fit(DATA(1), plans * layers, experts, replicas)
        || !within(DATA(2), plans * layers * servers, 0, INT32_MAX, "slots")) {
        goto done;
    }
    if (servers >> PLACE_SERVER_BITS != 0) {
        PyErr_SetString(PyExc_ValueError, "servers: too many");
        goto done;
    }
    size_t s = (size_t)servers, e = (size_t)experts;
    memory = malloc(s * (sizeof(double) + sizeof(int64_t) + 2 * sizeof(uint64_t)) + e * 3 * sizeof(Entry) + s * e + 1);
    if (memory == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    PlaceRoom room;
    room.by_load = (Entry *)memory;
    room.order = room.by_load + e;
    room.sorting = room.order + e;
    room.heap = (uint64_t *)(room.sorting + e);
    room.queue = room.heap + s;
    room.filled = (double *)(room.queue + s);
    room.left = (int64_t *)(room.filled + s);
    room.held = (uint8_t *)(room.left + s);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t l = 0; l < layers; l++) {
        Layer layer = {experts, servers, (double *)DATA(0) + l * experts, DATA(3)};
        sort_by_load(&layer, &room);
        for (Py_ssize_t p = 0; p < plans; p++) {
            Py_ssize_t at = p * layers + l;
            place(&layer, (int64_t *)DATA(1) + at * experts, (int64_t *)DATA(2) + at * servers,
                  (int32_t *)DATA(4) + at * replicas, &room);
        }
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    free(memory);
    close_arrays(a, COUNT_OF(a));
    return result;
}

static PyObject *
py_refine(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *o[4], *result = NULL;
    Py_ssize_t layers, experts, servers, replicas;
    long long budget;
    if (!PyArg_ParseTuple(args, "OOOnnnnLO", &o[0], &o[1], &o[2], &layers, &experts, &servers, &replicas, &budget,
                          &o[3])) {
        return NULL;
    }
    Array a[4] = {0};
    Entry *memory = NULL;
    if (!IN(0, "load", layers * experts, double) || !IN(1, "count", layers * experts, int64_t)
        || !IN(2, "speed", servers, double) || !OUT(3, "server", layers * replicas, int32_t)
        || !counts_fit(DATA(1), layers, experts, replicas) || !servers_fit(DATA(3), layers * replicas, servers)) {
        goto done;
    }
    size_t s = (size_t)servers, p = (size_t)replicas;
    memory = malloc(s * (sizeof(Entry) + sizeof(double)) + p * (sizeof(double) + 2 * sizeof(int32_t))
                    + (2 * s + 1) * sizeof(int32_t));
    if (memory == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    RefineRoom room;
    room.order = memory;
    room.filled = (double *)(room.order + s);
    room.value = room.filled + s;
    room.owner = (int32_t *)(room.value + p);
    room.listed = room.owner + p;
    room.start = room.listed + p;
    room.next = room.start + s + 1;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t l = 0; l < layers; l++) {
        Layer layer = {experts, servers, (double *)DATA(0) + l * experts, DATA(2)};
        refine(&layer, (int64_t *)DATA(1) + l * experts, (int32_t *)DATA(3) + l * replicas, budget, &room);
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    free(memory);
    close_arrays(a, COUNT_OF(a));
    return result;
}

static PyObject *
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

static PyObject *
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

static PyObject *
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

static PyObject *
py_spread(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *o[4], *result = NULL;
    Py_ssize_t layers, servers, experts;
    if (!PyArg_ParseTuple(args, "OOnnnOO", &o[0], &o[1], &layers, &servers, &experts, &o[2], &o[3])) {
        return NULL;
    }
    Array a[4] = {0};
    int32_t *memory = NULL;
    if (!IN(0, "count", layers * experts, int64_t) || !IN(1, "slots", layers * servers, int64_t)
        || !OUT(2, "holds", layers * servers * experts, uint8_t)
        || !OUT(3, "shares", layers * servers * experts, double)
        || !within(DATA(0), layers * experts, 0, servers, "count")
        || !within(DATA(1), layers * servers, 0, INT32_MAX, "slots")) {
        goto done;
    }
    size_t n = (size_t)servers;
    memory = calloc(n * (n + 6) + 1, sizeof(*memory));
    if (memory == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    SpreadRoom room = {memory,         memory + n,     memory + 2 * n, memory + 3 * n,
                       memory + 4 * n, memory + 5 * n, memory + 6 * n};
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t l = 0; l < layers; l++) {
        Py_ssize_t at = l * servers * experts;
        spread(experts, servers, (int64_t *)DATA(0) + l * experts, (int64_t *)DATA(1) + l * servers, l % servers,
               (uint8_t *)DATA(2) + at, (double *)DATA(3) + at, &room);
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    free(memory);
    close_arrays(a, COUNT_OF(a));
    return result;
}

static PyObject *
py_swap_hottest(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *o[4], *result = NULL;
    Py_ssize_t layers, servers, experts;
    long long budget;
    if (!PyArg_ParseTuple(args, "OOnnnLOO", &o[0], &o[1], &layers, &servers, &experts, &budget, &o[2], &o[3])) {
        return NULL;
    }
    Array a[4] = {0};
    double *filled = NULL;
    if (!IN(0, "load", layers * experts, double) || !IN(1, "speed", servers, double)
        || !OUT(2, "holds", layers * servers * experts, uint8_t) || !OUT(3, "swaps", layers, int64_t)) {
        goto done;
    }
    filled = malloc((size_t)(servers + experts) * sizeof(*filled) + 1);
    if (filled == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    int64_t *count = (int64_t *)(filled + servers);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t l = 0; l < layers; l++) {
        Layer layer = {experts, servers, (double *)DATA(0) + l * experts, DATA(1)};
        ((int64_t *)DATA(3))[l] =
            swap_hottest(&layer, (uint8_t *)DATA(2) + l * servers * experts, budget, filled, count);
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    free(filled);
    close_arrays(a, COUNT_OF(a));
    return result;
}

static PyObject *
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
        held_load(&layer, holds, count, (double *)DATA(3) + l * servers);
        ((uint8_t *)DATA(4))[l] = held_fits(holds, servers, experts, count, (int64_t *)DATA(2) + l * servers);
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    free(count);
    close_arrays(a, COUNT_OF(a));
    return result;
}

static PyObject *
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

static PyObject *
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

static PyObject *
py_match(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *o[5], *result = NULL;
    Py_ssize_t layers, servers, experts, replicas;
    int optimal;
    if (!PyArg_ParseTuple(args, "OOOOnnnnpO", &o[0], &o[1], &o[2], &o[3], &layers, &servers, &experts, &replicas,
                          &optimal, &o[4])) {
        return NULL;
    }
    Array a[5] = {0};
    char *memory = NULL;
    if (!IN(0, "count", layers * experts, int64_t) || !IN(1, "server", layers * replicas, int32_t)
        || !IN(2, "current", layers * servers * experts, uint8_t) || !IN(3, "kind", layers * servers, int64_t)
        || !OUT(4, "server_of", layers * servers, int64_t) || !counts_fit(DATA(0), layers, experts, replicas)
        || !servers_fit(DATA(1), layers * replicas, servers)) {
        goto done;
    }
    size_t n = (size_t)servers, cells = n * n;
    size_t work = optimal ? (n + 1) * 3 * (sizeof(double) + sizeof(int64_t)) : cells * 2 * sizeof(Entry);
    memory = malloc(work + (size_t)experts * sizeof(ptrdiff_t) + cells * sizeof(int32_t) + 1);
    if (memory == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    ptrdiff_t *start = (ptrdiff_t *)(memory + work);
    int32_t *overlap = (int32_t *)(start + experts);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t l = 0; l < layers; l++) {
        const int64_t *count = (int64_t *)DATA(0) + l * experts;
        const int32_t *server = (int32_t *)DATA(1) + l * replicas;
        const uint8_t *current = (uint8_t *)DATA(2) + l * servers * experts;
        const int64_t *kind = (int64_t *)DATA(3) + l * servers;
        int64_t *server_of = (int64_t *)DATA(4) + l * servers;
        count_overlap(servers, experts, count, server, current, start, overlap);
        if (optimal) {
            double *doubles = (double *)memory;
            match_optimal(servers, overlap, kind, server_of, doubles, (int64_t *)(doubles + 3 * (n + 1)));
        } else {
            match_greedy(servers, overlap, kind, server_of, (Entry *)memory, (Entry *)memory + cells);
        }
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    free(memory);
    close_arrays(a, COUNT_OF(a));
    return result;
}

static PyObject *
py_replay(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *o[4], *result = NULL;
    Py_ssize_t plans, batches, layers, experts, servers, replicas;
    if (!PyArg_ParseTuple(args, "OOOnnnnnnO", &o[0], &o[1], &o[2], &plans, &batches, &layers, &experts, &servers,
                          &replicas, &o[3])) {
        return NULL;
    }
    Array a[4] = {0};
    float *block = NULL;
    if (!IN(0, "load", batches * layers * experts, float) || !IN(1, "count", plans * layers * experts, int64_t)
        || !IN(2, "server", plans * layers * replicas, int32_t) || !OUT(3, "sum", plans * layers, double)
        || !counts_fit(DATA(1), plans * layers, experts, replicas)
        || !servers_fit(DATA(2), plans * layers * replicas, servers)) {
        goto done;
    }
    int wide = batches == 1 ? 1 : LANES;
    block = malloc((size_t)(experts + servers) * (size_t)wide * sizeof(*block) + 1);
    if (block == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t l = 0; l < layers; l++) {
        for (Py_ssize_t first = 0; first < batches; first += wide) {
            Py_ssize_t lanes = batches - first < wide ? batches - first : wide;
            memset(block, 0, (size_t)(experts * wide) * sizeof(*block));
            for (Py_ssize_t b = 0; b < lanes; b++) {
                const float *load = (float *)DATA(0) + ((first + b) * layers + l) * experts;
                for (Py_ssize_t e = 0; e < experts; e++) {
                    block[e * wide + b] = load[e];
                }
            }
            for (Py_ssize_t p = 0; p < plans; p++) {
                Py_ssize_t at = p * layers + l;
                replay(block, lanes, wide, experts, servers, (int64_t *)DATA(1) + at * experts,
                       (int32_t *)DATA(2) + at * replicas, block + experts * wide, (double *)DATA(3) + at);
            }
        }
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    free(block);
    close_arrays(a, COUNT_OF(a));
    return result;
}

static PyObject *
py_allocate(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *o[4], *result = NULL;
    Py_ssize_t layers, choices;
    long long budget;
    if (!PyArg_ParseTuple(args, "OOOnnLO", &o[0], &o[1], &o[2], &layers, &choices, &budget, &o[3])) {
        return NULL;
    }
    Array a[4] = {0};
    double *memory = NULL;
    if (!IN(0, "gain", layers * choices, double) || !IN(1, "replicas", choices, int64_t)
        || !IN(2, "limit", layers, int64_t) || !OUT(3, "chosen", layers, int64_t)
        || !within(DATA(1), choices, 1, INT32_MAX, "replicas")) {
        goto done;
    }
    if (budget < 0 || choices > INT8_MAX) {
        PyErr_SetString(PyExc_ValueError, "budget is negative, or too many choices");
        goto done;
    }
    size_t width = (size_t)budget + 1;
    memory = malloc(width * (2 * sizeof(double) + (size_t)layers));
    if (memory == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    allocate(DATA(0), DATA(1), DATA(2), layers, choices, budget, DATA(3), memory, memory + width,
             (int8_t *)(memory + 2 * width));
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    free(memory);
    close_arrays(a, COUNT_OF(a));
    return result;
}

static PyObject *
py_interleave(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *o[3], *result = NULL;
    Py_ssize_t layers, servers;
    if (!PyArg_ParseTuple(args, "OOnnO", &o[0], &o[1], &layers, &servers, &o[2])) {
        return NULL;
    }
    Array a[3] = {0};
    int64_t *sum = NULL;
    if (!IN(0, "total", layers, int64_t) || !IN(1, "slots", layers * servers, int64_t)
        || !OUT(2, "assigned", layers * servers, int64_t)) {
        goto done;
    }
    sum = malloc((size_t)servers * (sizeof(int64_t) + sizeof(int32_t)) + 1);
    if (sum == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    interleave(DATA(0), DATA(1), layers, servers, DATA(2), sum, (int32_t *)(sum + servers));
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    free(sum);
    close_arrays(a, COUNT_OF(a));
    return result;
}

static PyMethodDef methods[] = {
    {"replicate", py_replicate, METH_VARARGS, "Replicas of each expert."},
    {"pack", py_pack, METH_VARARGS, "EPLB's packing."},
    {"separate", py_separate, METH_VARARGS, "Parts replicas of one expert by exchanges of equal loads."},
    {"place", py_place, METH_VARARGS, "Packing for any slots, replicas of one expert apart."},
    {"refine", py_refine, METH_VARARGS, "Exchanges that lower the peak."},
    {"scatter", py_scatter, METH_VARARGS, "A compact placement as holds and shares."},
    {"scatter_physical", py_scatter_physical, METH_VARARGS, "Physical experts as holds and shares."},
    {"server_load", py_server_load, METH_VARARGS, "Loads of servers."},
    {"spread", py_spread, METH_VARARGS, "Placement without statistics."},
    {"swap_hottest", py_swap_hottest, METH_VARARGS, "ScalpeLB's swaps."},
    {"held_load", py_held_load, METH_VARARGS, "Loads of servers with equal shares."},
    {"equal_shares", py_equal_shares, METH_VARARGS, "Equal shares for all that hold an expert."},
    {"compact_load", py_compact_load, METH_VARARGS, "Loads of servers under a compact placement."},
    {"match", py_match, METH_VARARGS, "Packs to the servers that hold most of them."},
    {"replay", py_replay, METH_VARARGS, "Sums of balancedness over batches."},
    {"allocate", py_allocate, METH_VARARGS, "Replicas of layers under a budget."},
    {"interleave", py_interleave, METH_VARARGS, "Experts of servers, by layer."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_planning",
    .m_doc = "The loops of the placement policies.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC
PyInit__planning(void)
{
    return PyModule_Create(&definition);
}
