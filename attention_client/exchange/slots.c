/* Slots: the client's slots on one server, which of them are free, and the verbs on them (slot.h) for Python. */
#include "exchange.h"

#include <string.h>

static PyObject *
slots_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer",       "flags_offset",   "doorbells_offset",  "generations_offset", "slots_offset",
                            "request_stride", "result_stride", "first_slot",    "slots",              "payload_capacity",
                            "result_capacity", "reply_doorbell",  "doorbell",      "generation",         "hidden",
                            "direct",       NULL};
    PyObject *buffer;
    Py_ssize_t flags, doorbells, generations, slots_at, first, slots, reply_doorbell, doorbell, hidden;
    Py_ssize_t request_stride, result_stride, payload, result;
    unsigned int generation;
    int direct;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OnnnnnnnnnnnnInp:Slots", names, &buffer, &flags, &doorbells, &generations,
                                     &slots_at, &request_stride, &result_stride, &first, &slots, &payload, &result, &reply_doorbell, &doorbell,
                                     &generation, &hidden, &direct)) {
        return NULL;
    }
    Slots *self = (Slots *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    if (PyObject_GetBuffer(buffer, &self->view, PyBUF_WRITABLE) < 0) {
        self->view.obj = NULL;
        Py_DECREF(self);
        return NULL;
    }
    Py_ssize_t end = first + slots, stride = request_stride + result_stride, size = self->view.len;
    if (first < 0 || slots < 1 || slots > MOST_SLOTS || hidden < 1 || hidden > INT32_MAX || payload < 0 || result < 0 ||
        request_stride - payload < (Py_ssize_t)sizeof(RequestHeader) ||
        result_stride - result < (Py_ssize_t)sizeof(ResultHeader) || reply_doorbell < 0 || doorbell < 0 || flags < 0 || doorbells < 0 ||
        generations < 0 || slots_at < 0 || end > (size - flags) / LINE_BYTES || end > (size - generations) / 4 ||
        end > (size - slots_at) / stride || reply_doorbell >= (size - doorbells) / LINE_BYTES ||
        doorbell >= (size - doorbells) / LINE_BYTES) {
        Py_DECREF(self);
        PyErr_SetString(PyExc_ValueError, "the slots do not lie in the buffer");
        return NULL;
    }
    char *base = self->view.buf;
    self->grant = (Grant){
        .flags = (FlagLine *)(base + flags),
        .generations = (uint32_t *)(base + generations),
        .slots_at = base + slots_at,
        .request_stride = (size_t)request_stride,
        .result_stride = (size_t)result_stride,
        .payload_capacity = (uint64_t)payload,
        .result_capacity = (uint64_t)result,
        .generation = generation,
        .hidden = (uint32_t)hidden,
    };
    self->reply_doorbell = (Doorbell *)(base + doorbells) + reply_doorbell;
    self->doorbell = (Doorbell *)(base + doorbells) + doorbell;
    self->first = (int32_t)first;
    self->end = (int32_t)end;
    self->direct = direct != 0;
    for (Py_ssize_t i = 0; i < slots; i++) {
        self->free_slots[self->free_count++] = (int32_t)(end - 1 - i);
    }
    return (PyObject *)self;
}

void
slots_drop(Slots *self)
{
    if (self->view.obj != NULL && self->released && self->users == 0) {
        PyBuffer_Release(&self->view);
        self->view.obj = NULL;
    }
}

static void
slots_dealloc(Slots *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->view.obj != NULL) {
        PyBuffer_Release(&self->view);
    }
    PyObject_Free(self);
    Py_DECREF(type);
}

/* ---- the verbs -------------------------------------------------------------------------------------------- */

/* One of the granted slots, with its memory still there; or an exception. */
static bool
parse_slot(const Slots *self, PyObject *object, int32_t *slot)
{
    long number = PyLong_AsLong(object);
    if (number == -1 && PyErr_Occurred()) {
        return false;
    }
    if (self->view.obj == NULL || number < self->first || number >= self->end) {
        PyErr_Format(PyExc_ValueError, "slot %ld is not one of %d to %d, or they were released", number,
                     (int)self->first, (int)self->end);
        return false;
    }
    *slot = (int32_t)number;
    return true;
}

/* Open the arrays of a request, and check that they match and fit. */
static bool
open_request(const Slots *self, Array *arrays, PyObject *x, PyObject *scores, PyObject *rows, PyObject *ids,
             Inputs *inputs, Part *part)
{
    Py_ssize_t hidden = (Py_ssize_t)self->grant.hidden, width = (Py_ssize_t)value_bytes(inputs->dtype);
    if (!open_items(&arrays[0], x, "x", width, false) || !open_items(&arrays[1], rows, "rows", 8, false)) {
        return false;
    }
    Py_ssize_t tokens = arrays[0].view.len / width / hidden, count = arrays[1].view.len / 8;
    Py_ssize_t top_k = (Py_ssize_t)inputs->top_k;
    if (inputs->dtype < 0 || inputs->dtype >= WIRE_DTYPES || top_k < 1 || tokens > INT32_MAX / top_k ||
        !open_array(&arrays[2], scores, "scores", tokens * top_k, 4, false) ||
        !open_array(&arrays[3], ids, "ids", count * top_k, 4, false)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "dtype, tokens or top_k out of range");
        }
        return false;
    }
    inputs->x = arrays[0].view.buf;
    inputs->scores = arrays[2].view.buf;
    part->rows_R = arrays[1].view.buf;
    part->ids_RK = arrays[3].view.buf;
    part->rows = (uint32_t)count;
    bool right = arrays[0].view.len == tokens * hidden * width && count >= 1 &&
                 (uint64_t)count <= slot_tokens(&self->grant, inputs->top_k, inputs->dtype);
    for (Py_ssize_t r = 0; right && r < count; r++) {
        right = part->rows_R[r] >= 0 && part->rows_R[r] < tokens;
    }
    if (!right) {
        PyErr_SetString(PyExc_ValueError, "the request does not fit its inputs or its slot");
    }
    return right;
}

static PyObject *
slots_write(Slots *self, PyObject *args)
{
    PyObject *number, *x, *scores, *rows, *ids, *written = NULL;
    unsigned long long request_id, epoch, budget_us;
    unsigned char flags;
    Inputs inputs = {0};
    Part part = {0};
    int32_t slot;
    if (!PyArg_ParseTuple(args, "OKbKKIiOOIOO:write", &number, &request_id, &flags, &budget_us, &epoch, &inputs.layer,
                          &inputs.dtype, &x, &scores, &inputs.top_k, &rows, &ids) ||
        !parse_slot(self, number, &slot)) {
        return NULL;
    }
    part.request_id = request_id;
    part.flags = flags;
    part.budget_us = budget_us;
    inputs.epoch = epoch;
    Array arrays[4] = {0};
    if (open_request(self, arrays, x, scores, rows, ids, &inputs, &part)) {
        bool right;
        if (part.rows * self->grant.hidden * value_bytes(inputs.dtype) <= BRIEF_BYTES) {
            right = write_request(&self->grant, slot, &inputs, &part);
        } else {
            self->users++;
            Py_BEGIN_ALLOW_THREADS
            right = write_request(&self->grant, slot, &inputs, &part);
            Py_END_ALLOW_THREADS
            self->users--;
            slots_drop(self);
        }
        written = PyBool_FromLong(right);
    }
    close_arrays(arrays, COUNT_OF(arrays));
    return written;
}

static PyObject *
slots_hand_over(Slots *self, PyObject *number)
{
    int32_t slot;
    return parse_slot(self, number, &slot) ? PyBool_FromLong(hand_over(&self->grant, slot)) : NULL;
}

static PyObject *
slots_answer_of(Slots *self, PyObject *args)
{
    PyObject *number;
    unsigned long long request_id;
    unsigned int rows;
    int32_t slot;
    if (!PyArg_ParseTuple(args, "OKI:answer_of", &number, &request_id, &rows) || !parse_slot(self, number, &slot)) {
        return NULL;
    }
    ResultHeader header;
    Fault fault;
    AnswerState state = answer_of(&self->grant, slot, request_id, rows, &header, &fault);
    return Py_BuildValue("iy#s", (int)state, (const char *)&header,
                         state == ANSWER_CAME ? (Py_ssize_t)sizeof header : 0,
                         state == ANSWER_WRONG ? fault_words(fault) : "");
}

static PyObject *
slots_free(Slots *self, PyObject *number)
{
    int32_t slot;
    return parse_slot(self, number, &slot) ? PyBool_FromLong(free_slot(&self->grant, slot)) : NULL;
}

/* ---- which slots are free, and who uses the memory ------------------------------------------------------------- */

int32_t
slots_pop(Slots *self)
{
    return self->free_count > 0 ? self->free_slots[--self->free_count] : -1;
}

void
slots_push(Slots *self, int32_t slot)
{
    /* A full list means that a slot was given twice, which the caller reports. */
    if (self->free_count < MOST_SLOTS) {
        self->free_slots[self->free_count++] = slot;
    }
}

static PyObject *
slots_take(Slots *self, PyObject *Py_UNUSED(ignored))
{
    return PyLong_FromLong(slots_pop(self));
}

static PyObject *
slots_give(Slots *self, PyObject *slot)
{
    long number = PyLong_AsLong(slot);
    if (number == -1 && PyErr_Occurred()) {
        return NULL;
    }
    slots_push(self, (int32_t)number);
    Py_RETURN_NONE;
}

static PyObject *
slots_add_work(Slots *self, PyObject *work)
{
    double more = PyFloat_AsDouble(work);
    if (more == -1.0 && PyErr_Occurred()) {
        return NULL;
    }
    self->work += more;
    Py_RETURN_NONE;
}

static PyObject *
slots_set_times(Slots *self, PyObject *args)
{
    PyObject *expected;
    if (!PyArg_ParseTuple(args, "Od:set_times", &expected, &self->tail)) {
        return NULL;
    }
    Array array = {0};
    bool right = open_array(&array, expected, "expected", SIZE_CLASSES, 8, false);
    if (right) {
        memcpy(self->expected_s, array.view.buf, sizeof(self->expected_s));
    }
    close_arrays(&array, 1);
    return right ? Py_NewRef(Py_None) : NULL;
}

static PyObject *
slots_stop(Slots *self, PyObject *Py_UNUSED(ignored))
{
    self->stopped = true;
    Py_RETURN_NONE;
}

static PyObject *
slots_leave(Slots *self, PyObject *Py_UNUSED(ignored))
{
    if (self->users <= 0) {
        PyErr_SetString(PyExc_ValueError, "nobody uses the slots");
        return NULL;
    }
    self->users--;
    slots_drop(self);
    Py_RETURN_NONE;
}

static PyObject *
slots_users(Slots *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(self->users);
}

static PyObject *
slots_release(Slots *self, PyObject *Py_UNUSED(ignored))
{
    self->stopped = self->released = true;
    slots_drop(self);
    Py_RETURN_NONE;
}

static PyObject *
slots_free_count(Slots *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(self->free_count);
}

static PyObject *
slots_work(Slots *self, void *Py_UNUSED(closure))
{
    return PyFloat_FromDouble(self->work);
}

static PyObject *
slots_writers(Slots *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(self->writers);
}

static PyMethodDef slots_methods[] = {
    {"write", (PyCFunction)slots_write, METH_VARARGS, "see _exchange.pyi"},
    {"hand_over", (PyCFunction)slots_hand_over, METH_O, "see _exchange.pyi"},
    {"answer_of", (PyCFunction)slots_answer_of, METH_VARARGS, "see _exchange.pyi"},
    {"free", (PyCFunction)slots_free, METH_O, "see _exchange.pyi"},
    {"take", (PyCFunction)slots_take, METH_NOARGS, "take() -> a free slot, or -1"},
    {"give", (PyCFunction)slots_give, METH_O, "give(slot): the slot is free"},
    {"add_work", (PyCFunction)slots_add_work, METH_O, "add_work(work): change the work in flight"},
    {"set_times", (PyCFunction)slots_set_times, METH_VARARGS, "set_times(expected, tail)"},
    {"leave", (PyCFunction)slots_leave, METH_NOARGS, "leave(): a request that was handed over has an owner"},
    {"stop", (PyCFunction)slots_stop, METH_NOARGS, "stop(): no exchange uses the slots any more"},
    {"release", (PyCFunction)slots_release, METH_NOARGS, "release(): drop the buffer once no exchange uses it"},
    {NULL, NULL, 0, NULL},
};

static PyObject *
slots_abandoned(Slots *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(self->abandoned);
}

static int
slots_set_abandoned(Slots *self, PyObject *value, void *Py_UNUSED(closure))
{
    Py_ssize_t abandoned = value == NULL ? -1 : PyLong_AsSsize_t(value);
    if (abandoned < 0) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "abandoned must not be negative");
        }
        return -1;
    }
    self->abandoned = abandoned;
    return 0;
}

static PyGetSetDef slots_getset[] = {
    {"abandoned", (getter)slots_abandoned, (setter)slots_set_abandoned, "abandoned requests without an answer", NULL},
    {"free_count", (getter)slots_free_count, NULL, "number of free slots", NULL},
    {"work", (getter)slots_work, NULL, "work in flight", NULL},
    {"users", (getter)slots_users, NULL, "requests of exchanges, in flight or handed over", NULL},
    {"writers", (getter)slots_writers, NULL, "exchanges that write a request now", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots_slots[] = {
    {Py_tp_new, slots_new},         {Py_tp_dealloc, slots_dealloc}, {Py_tp_methods, slots_methods},
    {Py_tp_getset, slots_getset}, {Py_tp_doc, "see _exchange.pyi"}, {0, NULL},
};

PyType_Spec slots_spec = {
    .name = "attention_client.exchange._exchange.Slots",
    .basicsize = sizeof(Slots),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = slots_slots,
};

