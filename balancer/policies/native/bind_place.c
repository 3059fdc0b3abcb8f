/* Binds placing. Each function: checks, scratch memory, and a loop over layers. */
#include "bind.h"

PyObject *
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

PyObject *
py_pack(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *o[3], *result = NULL;
    Py_ssize_t layers, replicas, servers;
    if (!PyArg_ParseTuple(args, "OnnnOO", &o[0], &layers, &replicas, &servers, &o[1], &o[2])) {
        return NULL;
    }
    Array a[3] = {0};
    uint64_t *memory = NULL;
    Py_ssize_t size = layers * replicas;
    if (!IN(0, "value", size, double) || !OUT(1, "server", size, int64_t) || !OUT(2, "place", size, int64_t)) {
        goto done;
    }
    if (servers < 1 || replicas % servers != 0 || replicas > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "servers: must divide the replicas");
        goto done;
    }
    size_t n = (size_t)servers, r = (size_t)replicas;
    memory = malloc((n + 2 * r) * sizeof(*memory) + n * (sizeof(int64_t) + sizeof(float)));
    if (memory == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    PackRoom room = {.heap = memory, .order = memory + n, .sorting = memory + n + r};
    room.held = (int64_t *)(room.sorting + r);
    room.filled = (float *)(room.held + n);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < size; at += replicas) {
        pack(servers, (double *)DATA(0) + at, replicas, replicas / servers, (int64_t *)DATA(1) + at,
             (int64_t *)DATA(2) + at, &room);
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    free(memory);
    close_arrays(a, COUNT_OF(a));
    return result;
}

PyObject *
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

PyObject *
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
    if (servers >> PLACE_SERVER_BITS != 0 || experts >> PLACE_EXPERT_BITS != 0) {
        PyErr_SetString(PyExc_ValueError, "servers, or experts: too many");
        goto done;
    }
    size_t s = (size_t)servers, e = (size_t)experts;
    memory = malloc(s * (sizeof(double) + sizeof(int64_t) + 2 * sizeof(uint64_t)) + e * 3 * sizeof(uint64_t) + s * e + 1);
    if (memory == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    PlaceRoom room;
    room.by_load = (uint64_t *)memory;
    room.order = room.by_load + e;
    room.sorting = room.order + e;
    room.heap = room.sorting + e;
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

PyObject *
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

PyObject *
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
