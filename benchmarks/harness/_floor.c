/* The floor of an exchange: only the copies of its bytes between two processes.
 *
 *     mapping    line (64 bytes)   | flag u32 | 4 unused | request_bytes u64 | result_bytes u64 |
 *                request           | header (64 bytes) | payload |
 *                result            | header (64 bytes) | payload |   begins at a multiple of 64
 *
 *     client                                      server
 *     copy the request in, flag = WRITTEN
 *                                                 see the flag, copy a result in, flag = DONE
 *     see the flag, copy the result out, flag = FREE
 *
 * Both sides spin, so that a round trip has no sleep and no wake-up. An idle server soon sleeps on the flag (a
 * futex), so that it leaves its core to the other measurements.
 *
 * A header begins with the number of the round, which the server returns, so that a stale answer is detected.
 * On demand the two sides also exchange digests of the copies.
 */
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <linux/futex.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../../eaas/wire/spin.h"
#include "../../expert_server/kernels/direct.h"

#define LINE_BYTES 64
#define HEADER_BYTES 64
#define MS UINT64_C(1000000)
#define SLICE_NS (50 * MS)       /* Interval of Python's signal handlers. */
#define NUDGE_NS (1 * MS)        /* After this wait, wake a server that fell asleep during a turn. */
#define SPIN_NS (3 * MS)         /* An idle server sleeps after this. */
#define LOOKS_PER_CLOCK_READ 64

enum { FREE = 0, WRITTEN = 1, DONE = 2, STOP = 3 };

typedef struct {
    uint32_t flag;
    uint32_t unused;
    uint64_t request_bytes;
    uint64_t result_bytes;
} Line;

typedef struct {
    uint64_t round;
    uint64_t check; /* request: whether digests are wanted */
    uint64_t request_digest;
    uint64_t result_digest;
} Header;

_Static_assert(sizeof(Line) <= LINE_BYTES && sizeof(Header) <= HEADER_BYTES, "line and header fit");

/* ---- no Python from here to the next line --------------------------------------------------------------- */

static void
wake(uint32_t *flag)
{
    syscall(SYS_futex, flag, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void
sleep_while(uint32_t *flag, uint32_t value)
{
    struct timespec timeout = {.tv_sec = 1, .tv_nsec = 0}; /* A signal ends the wait. */
    syscall(SYS_futex, flag, FUTEX_WAIT, value, &timeout, NULL, 0);
}

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

/* FNV-1a over bytes. */
static uint64_t
digest(const char *bytes, uint64_t length)
{
    uint64_t hash = UINT64_C(14695981039346656037);
    for (uint64_t i = 0; i < length; i++) {
        hash = (hash ^ (unsigned char)bytes[i]) * UINT64_C(1099511628211);
    }
    return hash;
}

static char *
request_of(Line *line)
{
    return (char *)line + LINE_BYTES;
}

static char *
result_of(Line *line, uint64_t request_bytes)
{
    return request_of(line) + (request_bytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
}

/* Whether a mapping of `size` bytes holds a request and a result of these lengths. */
static bool
fits(uint64_t size, uint64_t request_bytes, uint64_t result_bytes)
{
    return request_bytes >= HEADER_BYTES && result_bytes >= HEADER_BYTES && request_bytes < size &&
           result_bytes < size && LINE_BYTES + request_bytes + LINE_BYTES + result_bytes <= size;
}

static void
answer(Line *line, const char *source)
{
    Header header;
    char *result = result_of(line, line->request_bytes);
    memcpy(&header, request_of(line), sizeof header);
    memcpy(result, source, line->result_bytes);
    if (header.check) {
        header.request_digest =
            digest(request_of(line) + HEADER_BYTES, line->request_bytes - HEADER_BYTES);
        header.result_digest = digest(source + HEADER_BYTES, line->result_bytes - HEADER_BYTES);
    }
    memcpy(result, &header, sizeof header);
    store(&line->flag, DONE);
}

typedef enum { SERVE_ON, SERVE_STOPPED, SERVE_TOO_LARGE } Served;

/* Answer for SLICE_NS, or sleep after `spin_until`. */
static Served
serve_slice(Line *line, const char *source, uint64_t source_bytes, uint64_t size, uint64_t *spin_until)
{
    uint64_t now = now_ns(), slice_end = now + SLICE_NS;
    while (now < slice_end) {
        for (int look = 0; look < LOOKS_PER_CLOCK_READ; look++) {
            uint32_t flag = load(&line->flag);
            if (flag == STOP) {
                return SERVE_STOPPED;
            }
            if (flag == WRITTEN) {
                if (line->result_bytes > source_bytes || !fits(size, line->request_bytes, line->result_bytes)) {
                    return SERVE_TOO_LARGE;
                }
                answer(line, source);
                *spin_until = now_ns() + SPIN_NS;
            }
            cpu_relax();
        }
        now = now_ns();
        if (now >= *spin_until) {
            uint32_t flag = load(&line->flag);
            if (flag != WRITTEN && flag != STOP) {
                sleep_while(&line->flag, flag);
            }
            return SERVE_ON;
        }
    }
    return SERVE_ON;
}

typedef enum { CALL_DONE, CALL_SLICE, CALL_TIMEOUT, CALL_WRONG } Called;

typedef struct {
    Line *line;
    const char *source;
    char *destination;
    uint64_t *took_ns;
    Py_ssize_t rounds;
    Py_ssize_t done;
    uint64_t started_ns; /* of the current round trip; 0: none */
    uint64_t timeout_ns;
    bool check;
} Call;

static void
begin_round(Call *call)
{
    Line *line = call->line;
    Header header = {.round = (uint64_t)call->done + 1, .check = call->check};
    call->started_ns = now_ns();
    memcpy(request_of(line), call->source, line->request_bytes);
    memcpy(request_of(line), &header, sizeof header);
    store(&line->flag, WRITTEN);
    if (call->done == 0) {
        wake(&line->flag);
    }
}

/* Spin until the answer comes, at most SLICE_NS. */
static Called
wait_done(const Call *call)
{
    uint32_t *flag = &call->line->flag;
    uint64_t now = call->started_ns, nudge = now + NUDGE_NS, slice_end = 0;
    for (;;) {
        for (int look = 0; look < LOOKS_PER_CLOCK_READ; look++) {
            if (load(flag) == DONE) {
                return CALL_DONE;
            }
            cpu_relax();
        }
        now = now_ns();
        slice_end = slice_end ? slice_end : now + SLICE_NS;
        if (now >= nudge) {
            wake(flag);
            nudge = now + NUDGE_NS;
        }
        if (now >= call->started_ns + call->timeout_ns) {
            return CALL_TIMEOUT;
        }
        if (now >= slice_end) {
            return CALL_SLICE;
        }
    }
}

static bool
end_round(Call *call)
{
    Line *line = call->line;
    Header header;
    memcpy(call->destination, result_of(line, line->request_bytes), line->result_bytes);
    store(&line->flag, FREE);
    call->took_ns[call->done] = now_ns() - call->started_ns;
    call->started_ns = 0;
    call->done++;
    memcpy(&header, call->destination, sizeof header);
    if (header.round != (uint64_t)call->done) {
        return false;
    }
    return !call->check ||
           (header.request_digest ==
                digest(call->source + HEADER_BYTES, line->request_bytes - HEADER_BYTES) &&
            header.result_digest ==
                digest(call->destination + HEADER_BYTES, line->result_bytes - HEADER_BYTES));
}

/* Make round trips for about SLICE_NS, or until there are enough. */
static Called
call_slice(Call *call)
{
    uint64_t slice_end = now_ns() + SLICE_NS;
    while (call->done < call->rounds) {
        if (call->started_ns == 0) {
            begin_round(call);
        }
        Called waited = wait_done(call);
        if (waited != CALL_DONE) {
            return waited;
        }
        if (!end_round(call)) {
            return CALL_WRONG;
        }
        if (now_ns() >= slice_end) {
            return CALL_SLICE;
        }
    }
    return CALL_DONE;
}

/* ---- Python --------------------------------------------------------------------------------------------- */

static bool
check_mapping(const Py_buffer *mapping)
{
    if (mapping->len < LINE_BYTES || (uintptr_t)mapping->buf % LINE_BYTES != 0) {
        PyErr_SetString(PyExc_ValueError, "the mapping is too small, or not aligned to 64 bytes");
        return false;
    }
    return true;
}

static PyObject *
floor_serve(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer mapping, source;
    if (!PyArg_ParseTuple(args, "w*y*:serve", &mapping, &source)) {
        return NULL;
    }
    Served served = SERVE_ON;
    uint64_t spin_until = 0;
    bool ok = check_mapping(&mapping);
    while (ok && served == SERVE_ON) {
        Py_BEGIN_ALLOW_THREADS
        served = serve_slice(mapping.buf, source.buf, (uint64_t)source.len, (uint64_t)mapping.len,
                             &spin_until);
        Py_END_ALLOW_THREADS
        ok = PyErr_CheckSignals() == 0;
    }
    if (ok && served == SERVE_TOO_LARGE) {
        PyErr_SetString(PyExc_ValueError, "a request or a result that does not fit");
        ok = false;
    }
    PyBuffer_Release(&mapping);
    PyBuffer_Release(&source);
    if (!ok) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static bool
run_call(Call *call)
{
    Called called = CALL_SLICE;
    while (called == CALL_SLICE) {
        Py_BEGIN_ALLOW_THREADS
        called = call_slice(call);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals() < 0) {
            return false;
        }
    }
    if (called == CALL_TIMEOUT) {
        PyErr_Format(PyExc_TimeoutError, "round trip %zd: no answer in %llu ms", call->done,
                     (unsigned long long)(call->timeout_ns / MS));
        return false;
    }
    if (called == CALL_WRONG) {
        PyErr_Format(PyExc_RuntimeError, "round trip %zd: other bytes arrived than were sent", call->done);
        return false;
    }
    return true;
}

static PyObject *
floor_call(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer mapping, source, destination, took;
    unsigned long long timeout_ms;
    int check;
    if (!PyArg_ParseTuple(args, "w*y*w*w*Kp:call", &mapping, &source, &destination, &took, &timeout_ms,
                          &check)) {
        return NULL;
    }
    Call call = {
        .line = mapping.buf,
        .source = source.buf,
        .destination = destination.buf,
        .took_ns = took.buf,
        .rounds = took.len / (Py_ssize_t)sizeof(uint64_t),
        .timeout_ns = timeout_ms * MS,
        .check = check != 0,
    };
    bool ok = check_mapping(&mapping);
    if (ok && !fits((uint64_t)mapping.len, (uint64_t)source.len, (uint64_t)destination.len)) {
        PyErr_SetString(PyExc_ValueError, "the mapping does not hold this request and this result");
        ok = false;
    }
    if (ok && (uintptr_t)took.buf % sizeof(uint64_t) != 0) {
        PyErr_SetString(PyExc_ValueError, "the times are not aligned to 8 bytes");
        ok = false;
    }
    if (ok) {
        /* The flag's release order, in the first round trip, makes them visible. */
        call.line->request_bytes = (uint64_t)source.len;
        call.line->result_bytes = (uint64_t)destination.len;
        ok = run_call(&call);
    }
    PyBuffer_Release(&mapping);
    PyBuffer_Release(&source);
    PyBuffer_Release(&destination);
    PyBuffer_Release(&took);
    if (!ok) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
floor_stop(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer mapping;
    if (!PyArg_ParseTuple(args, "w*:stop", &mapping)) {
        return NULL;
    }
    bool ok = check_mapping(&mapping);
    if (ok) {
        Line *line = mapping.buf;
        store(&line->flag, STOP);
        wake(&line->flag);
    }
    PyBuffer_Release(&mapping);
    if (!ok) {
        return NULL;
    }
    Py_RETURN_NONE;
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
    {"serve", floor_serve, METH_VARARGS, "serve(mapping, source): answer until `stop`"},
    {"call", floor_call, METH_VARARGS,
     "call(mapping, source, destination, took_ns, timeout_ms, check): round trips, one for each u64 of took_ns"},
    {"empty_layer", floor_empty_layer, METH_VARARGS, "empty_layer(hidden) -> a layer of direct.h"},
    {"stop", floor_stop, METH_VARARGS, "stop(mapping): end `serve`"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot floor_slots[] = {{0, NULL}};

static struct PyModuleDef floor_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_floor",
    .m_doc = "Round trips between two processes without Python: see the top of _floor.c.",
    .m_methods = floor_methods,
    .m_slots = floor_slots,
};

PyMODINIT_FUNC
PyInit__floor(void)
{
    return PyModuleDef_Init(&floor_module);
}
