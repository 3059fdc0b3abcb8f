/* The floor of an exchange: only the copies of its bytes between two threads, each on a core of its own.
 *
 *     shared     line (64 bytes: flag u32) | request | result, at a multiple of 64 |
 *
 *     client                                      server
 *     copy the request in, flag = WRITTEN
 *                                                 see the flag, copy the result in, flag = DONE
 *     see the flag, copy the result out, flag = FREE
 *
 * Both sides spin, so that a round trip has no sleep and no wake-up.
 */
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../../eaas/wire/spin.h"
#include "../../expert_server/kernels/direct.h"

#define LINE_BYTES 64
#define LEAST_ROUNDS 20

enum { FREE = 0, WRITTEN = 1, DONE = 2, STOP = 3 };

typedef struct {
    uint32_t *flag;
    char *request, *result;
    const char *answer;
    size_t request_bytes, result_bytes;
} Exchange;

/* ---- no Python from here to the next line --------------------------------------------------------------- */

static uint32_t
load(const uint32_t *flag)
{
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}

static void
store(uint32_t *flag, uint32_t value)
{
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}

static void *
serve(void *argument)
{
    const Exchange *exchange = argument;
    for (;;) {
        uint32_t flag = load(exchange->flag);
        if (flag == STOP) {
            return NULL;
        }
        if (flag == WRITTEN) {
            memcpy(exchange->result, exchange->answer, exchange->result_bytes);
            store(exchange->flag, DONE);
        }
        cpu_relax();
    }
}

/* Start the server on a core. Returns an errno. */
static int
start_server(pthread_t *server, int core, Exchange *exchange)
{
    cpu_set_t cores;
    pthread_attr_t attributes;
    CPU_ZERO(&cores);
    CPU_SET(core, &cores);
    int failure = pthread_attr_init(&attributes);
    if (failure) {
        return failure;
    }
    failure = pthread_attr_setaffinity_np(&attributes, sizeof cores, &cores);
    if (!failure) {
        failure = pthread_create(server, &attributes, serve, exchange);
    }
    pthread_attr_destroy(&attributes);
    return failure;
}

static void
round_trip(const Exchange *exchange, const char *source, char *destination)
{
    memcpy(exchange->request, source, exchange->request_bytes);
    store(exchange->flag, WRITTEN);
    while (load(exchange->flag) != DONE) {
        cpu_relax();
    }
    memcpy(destination, exchange->result, exchange->result_bytes);
    store(exchange->flag, FREE);
}

/* Time round trips on the caller's core for a while; the first, which waits for the server's start, does not
 * count. `rounds`: the most, and then how many there were. Returns an errno. */
static int
time_round_trips(Exchange *exchange, int core, const char *source, char *destination, uint64_t *took_ns,
                 Py_ssize_t *rounds, uint64_t for_ns)
{
    pthread_t server;
    Py_ssize_t done = 0;
    store(exchange->flag, FREE);
    int failure = start_server(&server, core, exchange);
    if (failure) {
        return failure;
    }
    round_trip(exchange, source, destination);
    uint64_t now = now_ns(), end = now + for_ns;
    while (done < *rounds && (done < LEAST_ROUNDS || now < end)) {
        uint64_t started = now_ns();
        round_trip(exchange, source, destination);
        now = now_ns();
        took_ns[done++] = now - started;
    }
    *rounds = done;
    store(exchange->flag, STOP);
    return pthread_join(server, NULL);
}

/* ---- Python --------------------------------------------------------------------------------------------- */

static PyObject *
floor_round_trips(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer shared, source, answer, destination, took;
    int core;
    unsigned long long for_ns;
    if (!PyArg_ParseTuple(args, "w*y*y*w*w*iK:round_trips", &shared, &source, &answer, &destination, &took,
                          &core, &for_ns)) {
        return NULL;
    }
    Py_ssize_t rounds = took.len / (Py_ssize_t)sizeof(uint64_t);
    Py_buffer *buffers[] = {&shared, &source, &answer, &destination, &took};
    size_t before = (LINE_BYTES + (size_t)source.len + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    bool ok = before + (size_t)answer.len <= (size_t)shared.len && destination.len == answer.len &&
              (uintptr_t)shared.buf % LINE_BYTES == 0 && (uintptr_t)took.buf % sizeof(uint64_t) == 0 &&
              core >= 0 && core < CPU_SETSIZE;
    if (!ok) {
        PyErr_SetString(PyExc_ValueError, "the buffers do not hold this request and this result");
    } else {
        Exchange exchange = {
            .flag = shared.buf,
            .request = (char *)shared.buf + LINE_BYTES,
            .result = (char *)shared.buf + before,
            .answer = answer.buf,
            .request_bytes = (size_t)source.len,
            .result_bytes = (size_t)answer.len,
        };
        int failure;
        Py_BEGIN_ALLOW_THREADS
        failure = time_round_trips(&exchange, core, source.buf, destination.buf, took.buf, &rounds, for_ns);
        Py_END_ALLOW_THREADS
        if (failure) {
            errno = failure;
            PyErr_SetFromErrno(PyExc_OSError);
            ok = false;
        }
    }
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) {
        PyBuffer_Release(buffers[i]);
    }
    return ok ? PyLong_FromSsize_t(rounds) : NULL;
}

/* A layer for a server's compiled code (direct.h) that computes nothing. */
static bool
run_empty(const DirectLayer *base, const void *x, bool is_bfloat16, const int32_t *ids, const float *scores,
          int tokens, int top_k, float *out)
{
    (void)x, (void)is_bfloat16, (void)ids, (void)scores, (void)top_k;
    memset(out, 0, (size_t)tokens * base->hidden * sizeof(float));
    return true;
}

static void
free_layer(PyObject *capsule)
{
    free(PyCapsule_GetPointer(capsule, DIRECT_LAYER));
}

static PyObject *
floor_empty_layer(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned int hidden;
    if (!PyArg_ParseTuple(args, "I:empty_layer", &hidden)) {
        return NULL;
    }
    DirectLayer *layer = malloc(sizeof *layer);
    if (layer == NULL) {
        return PyErr_NoMemory();
    }
    *layer = (DirectLayer){hidden, run_empty};
    PyObject *capsule = PyCapsule_New(layer, DIRECT_LAYER, free_layer);
    if (capsule == NULL) {
        free(layer);
    }
    return capsule;
}

static PyMethodDef floor_methods[] = {
    {"round_trips", floor_round_trips, METH_VARARGS,
     "round_trips(shared, source, answer, destination, took_ns, core, for_ns) -> round trips timed; the other "
     "side runs on the core"},
    {"empty_layer", floor_empty_layer, METH_VARARGS, "empty_layer(hidden) -> a layer of direct.h"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot floor_slots[] = {{0, NULL}};

static struct PyModuleDef floor_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_floor",
    .m_doc = "Round trips between two threads without Python: see the top of _floor.c.",
    .m_methods = floor_methods,
    .m_slots = floor_slots,
};

PyMODINIT_FUNC
PyInit__floor(void)
{
    return PyModuleDef_Init(&floor_module);
}
