/* Answers one request in its slot, without Python between the header and the doorbell.
 *
 *     accept    the flag is WRITTEN, header copied once, copy validated          with the GIL
 *     answer    layer computed from the slot into the slot, result header,
 *               WRITTEN to DONE, reply bell                                      without the GIL
 *
 * It takes only plain requests, and has no errors to report: whatever is unusual about a request, the loop's
 * ordinary path finds it again and says so. Nothing has changed by then but the bytes of the result.
 *
 * The caller has claimed the slot, so that its bytes belong to one client until the release (slot_ownership.py). That
 * client may write to them at any time. So only the copy of the header is used, and ids are read once by the kernel.
 */
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "../../eaas/wire/bell.h"
#include "../../eaas/wire/headers.h"
#include "../../eaas/wire/spin.h"
#include "../kernels/direct.h"

#define MOST_PAIRS (1u << 16) /* T * K: no product below overflows, for any H. */

/* Mirrors SlotLimits of slot.py. */
typedef struct {
    uint64_t payload_capacity;
    uint64_t result_capacity;
    uint64_t hidden_size;
    uint64_t num_layers;
} Limits;

/* An accepted request. */
typedef struct {
    RequestHeader header; /* the private copy */
    Py_ssize_t slot;
    PyObject *layer;      /* capsule; NULL: none is accepted */
    size_t ids_offset;    /* from the payload's start */
    size_t scores_offset;
} Request;

typedef struct {
    PyObject_HEAD
    Py_buffer view;
    FlagLine *flags;
    BellLine *bells;
    char *slots; /* the request header of slot 0 */
    Py_ssize_t count;
    size_t request_stride;
    size_t slot_stride;
    Limits limits;
    PyObject *layers; /* list: a capsule of direct.h, or None */
    Request request;
    unsigned long long answered;
    bool computing;
    bool released;
} Direct;

/* ---- the slot, without Python ------------------------------------------------------------------------ */

static uint64_t
align(uint64_t length)
{
    return (length + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
}

/* Volatile: the compiler must not read a field in the slot again instead of the copy. */
static void
copy_header(const char *from, RequestHeader *header)
{
    const volatile uint64_t *words = (const volatile uint64_t *)from;
    uint64_t copy[sizeof(RequestHeader) / sizeof(uint64_t)];
    for (size_t i = 0; i < sizeof copy / sizeof *copy; i++) {
        copy[i] = words[i];
    }
    memcpy(header, copy, sizeof copy);
}

/* Whether this is a valid request (`validate_request` in slot.py) of the plain kind; sets the offsets. */
static bool
is_plain(Request *request, const Limits *limits, unsigned long long generation)
{
    const RequestHeader *header = &request->header;
    if (header->magic != WIRE_MAGIC || header->version != WIRE_VERSION || header->generation != generation ||
        header->flags != 0 || header->checksum != 0 ||
        (header->dtype != WIRE_FLOAT32 && header->dtype != WIRE_BFLOAT16) ||
        header->hidden_size != limits->hidden_size || header->layer >= limits->num_layers) {
        return false;
    }
    /* With a budget of 0 it has expired. Any other begins now. */
    if (header->budget_us == 0) {
        return false;
    }
    uint64_t tokens = header->batch_size;
    uint64_t pairs = tokens * header->top_k;
    if (tokens > MOST_PAIRS || pairs == 0 || pairs > MOST_PAIRS) {
        return false;
    }
    uint64_t values = tokens * header->hidden_size;
    uint64_t ids_offset = align(values * (header->dtype == WIRE_BFLOAT16 ? 2 : 4));
    uint64_t scores_offset = ids_offset + align(pairs * sizeof(int32_t));
    uint64_t total = scores_offset + pairs * sizeof(float);
    request->ids_offset = ids_offset;
    request->scores_offset = scores_offset;
    return header->payload_length == total && total <= limits->payload_capacity &&
           values * sizeof(float) <= limits->result_capacity;
}

static uint64_t
service_us(double seconds)
{
    /* 0 means unknown. */
    return seconds >= 1e-6 ? (uint64_t)(seconds * 1e6) : 1;
}

static double
now_s(void)
{
    return (double)now_ns() * 1e-9;
}

/* Compute and reply. Returns false if the kernel cannot. */
static bool
answer_slot(Direct *self, const Request *request, const DirectLayer *layer, BellLine *bell, double seen_at,
            double *ended)
{
    const RequestHeader *header = &request->header;
    char *slot = self->slots + (size_t)request->slot * self->slot_stride;
    const char *payload = slot + sizeof(RequestHeader);
    char *result = slot + self->request_stride;
    if (!layer->run(layer, payload, header->dtype == WIRE_BFLOAT16,
                    (const int32_t *)(payload + request->ids_offset),
                    (const float *)(payload + request->scores_offset), (int)header->batch_size,
                    (int)header->top_k, (float *)(result + sizeof(ResultHeader)))) {
        return false;
    }
    *ended = now_s();
    const ResultHeader answer = {
        .magic = WIRE_MAGIC,
        .version = WIRE_VERSION,
        .status = STATUS_OK,
        .generation = header->generation,
        .request_id = header->request_id,
        .rows = header->batch_size,
        .hidden_size = header->hidden_size,
        .length = (uint64_t)header->batch_size * header->hidden_size * sizeof(float),
        .service_us = service_us(*ended - seen_at),
    };
    memcpy(result, &answer, sizeof answer);
    /* Before the flag: a client with the answer finds it counted. */
    __atomic_fetch_add(&self->answered, 1, __ATOMIC_RELAXED);
    uint32_t written = SLOT_WRITTEN;
    if (__atomic_compare_exchange_n(&self->flags[request->slot].value, &written, SLOT_DONE, false,
                                    __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        ring_bell(bell);
    }
    return true;
}

/* ---- the Python class ----------------------------------------------------------------------------------- */

static void
drop_buffer(Direct *self)
{
    if (self->view.obj != NULL) {
        PyBuffer_Release(&self->view);
        self->view.obj = NULL;
    }
}

/* The sizes are those of an `Arena`; only a wrong caller fails here. */
static bool
lies_in_buffer(const Direct *self, Py_ssize_t flags_offset, Py_ssize_t bells_offset, Py_ssize_t slots_offset,
               Py_ssize_t result_stride)
{
    const Limits *limits = &self->limits;
    Py_ssize_t lines = self->count * LINE_BYTES;
    return self->count > 0 && self->count < self->view.len / LINE_BYTES && slots_offset < self->view.len &&
           (int64_t)(limits->payload_capacity | limits->result_capacity) >= 0 &&
           (Py_ssize_t)(self->request_stride | (size_t)result_stride) >= 0 && flags_offset >= 0 && bells_offset >= flags_offset + lines &&
           slots_offset >= bells_offset + lines + LINE_BYTES &&
           self->request_stride >= sizeof(RequestHeader) + limits->payload_capacity &&
           (size_t)result_stride >= sizeof(ResultHeader) + limits->result_capacity &&
           ((self->request_stride | self->slot_stride | (size_t)flags_offset | (size_t)bells_offset |
             (size_t)slots_offset | (uintptr_t)self->view.buf) %
            LINE_BYTES) == 0 &&
           (size_t)(self->view.len - slots_offset) / self->slot_stride >= (size_t)self->count;
}

static PyObject *
direct_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer", "count", "offsets", "strides", "limits", "layers", NULL};
    PyObject *buffer;
    PyObject *layers;
    Py_ssize_t count;
    Py_ssize_t flags_offset;
    Py_ssize_t bells_offset;
    Py_ssize_t slots_offset;
    Py_ssize_t request_stride;
    Py_ssize_t result_stride;
    Py_ssize_t payload;
    Py_ssize_t result;
    Py_ssize_t hidden;
    Py_ssize_t num_layers;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "On(nnn)(nn)(nnnn)O:Direct", names, &buffer, &count,
                                     &flags_offset, &bells_offset, &slots_offset, &request_stride,
                                     &result_stride, &payload, &result, &hidden, &num_layers, &layers)) {
        return NULL;
    }
    if (!PyList_Check(layers)) {
        PyErr_SetString(PyExc_TypeError, "the layers are not in a list");
        return NULL;
    }
    Direct *self = (Direct *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    if (PyObject_GetBuffer(buffer, &self->view, PyBUF_WRITABLE) < 0) {
        self->view.obj = NULL;
        Py_DECREF(self);
        return NULL;
    }
    self->count = count;
    self->request_stride = (size_t)request_stride;
    self->slot_stride = (size_t)request_stride + (size_t)result_stride;
    self->limits = (Limits){(uint64_t)payload, (uint64_t)result, (uint64_t)hidden, (uint64_t)num_layers};
    if (!lies_in_buffer(self, flags_offset, bells_offset, slots_offset, result_stride)) {
        PyErr_SetString(PyExc_ValueError, "these slots do not lie in the buffer");
        Py_DECREF(self);
        return NULL;
    }
    char *start = self->view.buf;
    self->flags = (FlagLine *)(start + flags_offset);
    self->bells = (BellLine *)(start + bells_offset);
    self->slots = start + slots_offset;
    Py_INCREF(layers);
    self->layers = layers;
    return (PyObject *)self;
}

static void
direct_dealloc(Direct *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->request.layer);
    Py_XDECREF(self->layers);
    drop_buffer(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

static bool
parse_index(PyObject *object, Py_ssize_t limit, Py_ssize_t *index)
{
    *index = PyNumber_AsSsize_t(object, PyExc_IndexError);
    if (*index == -1 && PyErr_Occurred()) {
        return false;
    }
    if (*index < 0 || *index >= limit) {
        PyErr_Format(PyExc_IndexError, "%zd of %zd", *index, limit);
        return false;
    }
    return true;
}

/* The layer of an accepted header, borrowed; NULL: only Python can call the kernel for it. */
static PyObject *
prepared_layer(const Direct *self, const RequestHeader *header)
{
    if ((Py_ssize_t)header->layer >= PyList_Size(self->layers)) {
        return NULL;
    }
    PyObject *capsule = PyList_GetItem(self->layers, (Py_ssize_t)header->layer);
    if (!PyCapsule_IsValid(capsule, DIRECT_LAYER)) {
        return NULL;
    }
    const DirectLayer *layer = PyCapsule_GetPointer(capsule, DIRECT_LAYER);
    return layer->hidden == header->hidden_size ? capsule : NULL;
}

static PyObject *
direct_accept(Direct *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "accept(slot, generation)");
        return NULL;
    }
    Py_ssize_t slot;
    if (!parse_index(args[0], self->count, &slot)) {
        return NULL;
    }
    unsigned long long generation = PyLong_AsUnsignedLongLong(args[1]);
    if (generation == (unsigned long long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    Py_CLEAR(self->request.layer);
    if (self->released || __atomic_load_n(&self->flags[slot].value, __ATOMIC_ACQUIRE) != SLOT_WRITTEN) {
        Py_RETURN_NONE;
    }
    Request request = {.slot = slot};
    copy_header(self->slots + (size_t)slot * self->slot_stride, &request.header);
    if (!is_plain(&request, &self->limits, generation) ||
        (request.layer = prepared_layer(self, &request.header)) == NULL) {
        Py_RETURN_NONE;
    }
    Py_INCREF(request.layer);
    self->request = request;
    return Py_BuildValue("(II)", request.header.layer, request.header.batch_size);
}

static PyObject *
direct_answer(Direct *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "answer(bell, seen_at)");
        return NULL;
    }
    Py_ssize_t bell;
    if (!parse_index(args[0], self->count + 1, &bell)) {
        return NULL;
    }
    double seen_at = PyFloat_AsDouble(args[1]);
    if (seen_at == -1.0 && PyErr_Occurred()) {
        return NULL;
    }
    if (self->request.layer == NULL || self->released || self->computing) {
        PyErr_SetString(PyExc_ValueError, "no request is accepted");
        return NULL;
    }
    Request request = self->request;
    self->request.layer = NULL;
    const DirectLayer *layer = PyCapsule_GetPointer(request.layer, DIRECT_LAYER);
    bool answered;
    double ended = 0.0;
    self->computing = true;
    Py_BEGIN_ALLOW_THREADS
    answered = answer_slot(self, &request, layer, &self->bells[bell], seen_at, &ended);
    Py_END_ALLOW_THREADS
    self->computing = false;
    Py_DECREF(request.layer);
    if (self->released) {
        drop_buffer(self);
    }
    if (!answered) {
        Py_RETURN_NONE;
    }
    return PyFloat_FromDouble(ended);
}

static PyObject *
direct_release(Direct *self, PyObject *Py_UNUSED(ignored))
{
    self->released = true;
    Py_CLEAR(self->request.layer);
    if (!self->computing) {
        drop_buffer(self);
    }
    Py_RETURN_NONE;
}

static PyObject *
direct_answered(Direct *self, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(__atomic_load_n(&self->answered, __ATOMIC_RELAXED));
}

#define FAST(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef direct_methods[] = {
    {"accept", FAST(direct_accept), METH_FASTCALL, "accept(slot, generation) -> (layer, tokens) or None"},
    {"answer", FAST(direct_answer), METH_FASTCALL, "answer(bell, seen_at) -> when it ended, or None"},
    {"release", (PyCFunction)direct_release, METH_NOARGS, "release(): drop the buffer"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef direct_getters[] = {
    {"answered", (getter)direct_answered, NULL, "requests answered so far", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot direct_slots[] = {
    {Py_tp_new, direct_new},
    {Py_tp_dealloc, direct_dealloc},
    {Py_tp_methods, direct_methods},
    {Py_tp_getset, direct_getters},
    {Py_tp_doc, "Direct(buffer, count, offsets, strides, limits, layers): see _direct.pyi"},
    {0, NULL},
};

static PyType_Spec direct_spec = {
    .name = "expert_server.loop._direct.Direct",
    .basicsize = sizeof(Direct),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = direct_slots,
};

static int
module_exec(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &direct_spec, NULL);
    if (type == NULL) {
        return -1;
    }
    int result = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return result;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_direct",
    .m_doc = "Answers one request in its slot.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__direct(void)
{
    return PyModuleDef_Init(&module_definition);
}
