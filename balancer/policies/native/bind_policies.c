/* Binds the loops of ScalpeLB and CRAFT. Each function: checks, scratch memory, and a loop over layers. */
#include "bind.h"

PyObject *
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
        || !OUT(2, "holds", layers * servers * experts, uint8_t) || !OUT(3, "swaps", layers, int64_t)
        || !list_fits(servers, experts)) {
        goto done;
    }
    filled = malloc((size_t)(2 * servers + experts) * sizeof(*filled) + list_bytes(servers, experts));
    if (filled == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    int64_t *count = (int64_t *)(filled + 2 * servers);
    HeldList list = list_in(count + experts, servers);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t l = 0; l < layers; l++) {
        Layer layer = {experts, servers, (double *)DATA(0) + l * experts, DATA(1)};
        ((int64_t *)DATA(3))[l] = swap_hottest(&layer, (uint8_t *)DATA(2) + l * servers * experts, budget, filled,
                                               filled + servers, count, &list);
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    free(filled);
    close_arrays(a, COUNT_OF(a));
    return result;
}

PyObject *
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
    size_t n = (size_t)servers, e = (size_t)experts, cells = n * n;
    if (!list_fits(servers, experts)) {
        goto done;
    }
    if (cells > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "servers: too many");
        goto done;
    }
    size_t whole = optimal ? cells : 0;
    memory = malloc((optimal ? (n + 1) * 3 * (sizeof(double) + sizeof(int64_t)) : 0) + cells * sizeof(Overlap)
                    + (whole + n * e + (e + 1) + (size_t)replicas + 4 * n + 2) * sizeof(int32_t)
                    + list_bytes(servers, experts));
    if (memory == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    double *doubles = (double *)memory;
    int64_t *ints = (int64_t *)(doubles + (optimal ? 3 * (n + 1) : 0));
    MatchRoom room = {.overlap = (Overlap *)(ints + (optimal ? 3 * (n + 1) : 0))};
    room.holder = (int32_t *)(room.overlap + cells);
    room.first = room.holder + n * e;
    room.packed = room.first + e + 1;
    room.first_pack = room.packed + replicas;
    room.first_overlap = room.first_pack + n + 1;
    room.common = room.first_overlap + n + 1;
    room.left = room.common + n;
    int32_t *overlap = room.left + n;
    room.held = list_in(overlap + whole, servers);
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t l = 0; l < layers; l++) {
        const int64_t *kind = (int64_t *)DATA(3) + l * servers;
        int64_t *server_of = (int64_t *)DATA(4) + l * servers;
        find_overlaps(servers, experts, (int64_t *)DATA(0) + l * experts, (int32_t *)DATA(1) + l * replicas,
                      (uint8_t *)DATA(2) + l * servers * experts, &room);
        if (optimal) {
            match_optimal(servers, kind, server_of, &room, overlap, doubles, ints);
        } else {
            match_greedy(servers, kind, server_of, &room);
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

PyObject *
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

PyObject *
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
