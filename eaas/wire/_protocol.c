/* Python's face of protocol.h: its numbers, the places of headers' fields, lengths, and what is valid. */
#include "../minmax/arrays.h"
#include "protocol.h"

#include <string.h>

/* (words, whether it is the frame's, whether the request is intact and misfits), or None. */
static PyObject *
described(Fault fault)
{
    if (fault == FAULT_NONE) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(sNN)", fault_words(fault), PyBool_FromLong(is_frame_fault(fault)), PyBool_FromLong(is_misfit(fault)));
}

/* Copy the bytes of a header, or set an exception. */
static bool
copy_bytes(void *header, size_t size, const char *bytes, Py_ssize_t given)
{
    if ((size_t)given != size) {
        PyErr_Format(PyExc_ValueError, "a header has %zu bytes, not %zd", size, given);
        return false;
    }
    memcpy(header, bytes, size);
    return true;
}

static PyObject *
py_request_fault(PyObject *Py_UNUSED(self), PyObject *args)
{
    const char *bytes;
    Py_ssize_t size;
    unsigned long long payload, result, hidden, layers;
    unsigned int generation;
    if (!PyArg_ParseTuple(args, "y#(KKKK)I:request_fault", &bytes, &size, &payload, &result, &hidden, &layers,
                          &generation)) {
        return NULL;
    }
    RequestHeader header;
    SlotLimits limits = {payload, result, hidden, layers};
    PayloadLayout layout;
    return copy_bytes(&header, sizeof header, bytes, size)
               ? described(request_fault(&header, &limits, generation, &layout))
               : NULL;
}

static PyObject *
py_answer_fault(PyObject *Py_UNUSED(self), PyObject *args)
{
    const char *bytes;
    Py_ssize_t size;
    unsigned long long request_id, capacity;
    unsigned int generation, rows, hidden;
    if (!PyArg_ParseTuple(args, "y#KKIII:answer_fault", &bytes, &size, &request_id, &capacity, &generation, &rows,
                          &hidden)) {
        return NULL;
    }
    ResultHeader header;
    Awaited awaited = {request_id, capacity, generation, rows, hidden};
    return copy_bytes(&header, sizeof header, bytes, size) ? described(answer_fault(&header, &awaited)) : NULL;
}

static PyObject *
py_payload_layout(PyObject *Py_UNUSED(self), PyObject *args)
{
    unsigned long long tokens, hidden, top_k;
    int dtype;
    if (!PyArg_ParseTuple(args, "KKKi:payload_layout", &tokens, &hidden, &top_k, &dtype)) {
        return NULL;
    }
    PayloadLayout layout = payload_layout(tokens, hidden, top_k, dtype);
    return Py_BuildValue("(KKK)", (unsigned long long)layout.ids_offset, (unsigned long long)layout.scores_offset,
                         (unsigned long long)layout.total);
}

static PyObject *
py_result_length(PyObject *Py_UNUSED(self), PyObject *args)
{
    unsigned long long rows, hidden;
    return PyArg_ParseTuple(args, "KK:result_length", &rows, &hidden)
               ? PyLong_FromUnsignedLongLong(result_length(rows, hidden))
               : NULL;
}

static PyObject *
py_max_tokens(PyObject *Py_UNUSED(self), PyObject *args)
{
    unsigned long long payload, result;
    unsigned int hidden, top_k;
    int dtype;
    if (!PyArg_ParseTuple(args, "KKIIi:max_tokens", &payload, &result, &hidden, &top_k, &dtype)) {
        return NULL;
    }
    if (hidden == 0) {
        PyErr_SetString(PyExc_ValueError, "the hidden size is 0");
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(max_tokens(payload, result, hidden, top_k, dtype));
}

/* Places of a header's fields, in the order of header.py's tuples. */
static int
add_places(PyObject *module)
{
#define PLACE(type, name) (Py_ssize_t)offsetof(type, name), (Py_ssize_t)sizeof(((type *)0)->name)
#define REQUEST(name) PLACE(RequestHeader, name)
#define RESULT(name) PLACE(ResultHeader, name)
    PyObject *request = Py_BuildValue(
        "((nn)(nn)(nn)(nn)(nn)(nn)(nn)(nn)(nn)(nn)(nn)(nn)(nn)(nn))", REQUEST(magic), REQUEST(version), REQUEST(dtype),
        REQUEST(flags), REQUEST(generation), REQUEST(checksum), REQUEST(request_id), REQUEST(epoch),
        REQUEST(payload_length), REQUEST(budget_us), REQUEST(layer), REQUEST(batch_size), REQUEST(hidden_size),
        REQUEST(top_k));
    PyObject *result = Py_BuildValue("((nn)(nn)(nn)(nn)(nn)(nn)(nn)(nn)(nn)(nn)(nn)(nn))", RESULT(magic), RESULT(version),
                                     RESULT(status), RESULT(generation), RESULT(checksum), RESULT(request_id),
                                     RESULT(rows), RESULT(hidden_size), RESULT(length), RESULT(detail),
                                     RESULT(service_us), RESULT(queue_us));
    bool added = request != NULL && result != NULL && PyModule_AddObjectRef(module, "REQUEST_PLACES", request) == 0 &&
                 PyModule_AddObjectRef(module, "RESULT_PLACES", result) == 0;
    Py_XDECREF(request);
    Py_XDECREF(result);
    return added ? 0 : -1;
}

static int
module_exec(PyObject *module)
{
#define NUMBER(name) {#name, name}
    static const struct {
        const char *name;
        long value;
    } numbers[] = {
        {"MAGIC", WIRE_MAGIC},
        {"VERSION", WIRE_VERSION},
        {"ALIGNMENT", WIRE_ALIGNMENT},
        {"REQUEST_HEADER_BYTES", sizeof(RequestHeader)},
        {"RESULT_HEADER_BYTES", sizeof(ResultHeader)},
        {"TRACE_OFFSET", offsetof(RequestHeader, trace)},
        {"FLOAT32", WIRE_FLOAT32},
        {"BFLOAT16", WIRE_BFLOAT16},
        {"FLOAT16", WIRE_FLOAT16},
        NUMBER(DOORBELL),
        NUMBER(CHECKSUM_FLAG),
        NUMBER(DETAIL_DAMAGED),
        NUMBER(TRACE_BYTES),
        NUMBER(SLOT_FREE),
        NUMBER(SLOT_WRITTEN),
        NUMBER(SLOT_DONE),
        NUMBER(SLOT_OFFLINE),
        NUMBER(STATUS_OK),
        NUMBER(STATUS_INVALID_ARGUMENT),
        NUMBER(STATUS_STALE_PLACEMENT),
        NUMBER(STATUS_INTERNAL),
        NUMBER(STATUS_EXPIRED),
    };
    for (size_t i = 0; i < COUNT_OF(numbers); i++) {
        if (PyModule_AddIntConstant(module, numbers[i].name, numbers[i].value) < 0) {
            return -1;
        }
    }
    return add_places(module);
}

static PyMethodDef methods[] = {
    {"request_fault", py_request_fault, METH_VARARGS, "see _protocol.pyi"},
    {"answer_fault", py_answer_fault, METH_VARARGS, "see _protocol.pyi"},
    {"payload_layout", py_payload_layout, METH_VARARGS, "see _protocol.pyi"},
    {"result_length", py_result_length, METH_VARARGS, "see _protocol.pyi"},
    {"max_tokens", py_max_tokens, METH_VARARGS, "see _protocol.pyi"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_protocol", .m_size = 0, .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__protocol(void)
{
    return PyModuleDef_Init(&module);
}
