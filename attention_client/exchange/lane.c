/* Lane: the client's slots on one server. */
#include "exchange.h"

#include <string.h>

static PyObject *
lane_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer",       "flags_offset",   "bells_offset",  "generations_offset", "slots_offset",
                            "request_stride", "result_stride", "first_slot",    "slots",              "payload_capacity",
                            "result_capacity", "reply_bell",  "doorbell",      "generation",         "hidden",
                            "direct",       NULL};
    PyObject *buffer;
    Py_ssize_t flags, bells, generations, slots_at, first, slots, reply_bell, doorbell, hidden;
    Py_ssize_t request_stride, result_stride, payload, result;
    unsigned int generation;
    int direct;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OnnnnnnnnnnnnInp:Lane", names, &buffer, &flags, &bells, &generations,
                                     &slots_at, &request_stride, &result_stride, &first, &slots, &payload, &result, &reply_bell, &doorbell,
                                     &generation, &hidden, &direct)) {
        return NULL;
    }
    Lane *self = (Lane *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    if (PyObject_GetBuffer(buffer, &self->view, PyBUF_WRITABLE) < 0) {
        self->view.obj = NULL;
        Py_DECREF(self);
        return NULL;
    }
    Py_ssize_t end = first + slots, stride = request_stride + result_stride, size = self->view.len;
    if (first < 0 || slots < 1 || slots > MOST_SLOTS || hidden < 1 || payload < 0 || result < 0 ||
        request_stride - payload < (Py_ssize_t)sizeof(RequestHeader) ||
        result_stride - result < (Py_ssize_t)sizeof(ResultHeader) || reply_bell < 0 || doorbell < 0 || flags < 0 || bells < 0 ||
        generations < 0 || slots_at < 0 || end > (size - flags) / LINE_BYTES || end > (size - generations) / 4 ||
        end > (size - slots_at) / stride || reply_bell >= (size - bells) / LINE_BYTES ||
        doorbell >= (size - bells) / LINE_BYTES) {
        Py_DECREF(self);
        PyErr_SetString(PyExc_ValueError, "the slots do not lie in the buffer");
        return NULL;
    }
    char *base = self->view.buf;
    self->flags = (FlagLine *)(base + flags);
    self->bells = (BellLine *)(base + bells);
    self->generations = (uint32_t *)(base + generations);
    self->slots_at = base + slots_at;
    self->request_stride = request_stride;
    self->result_stride = result_stride;
    self->payload_capacity = payload;
    self->result_capacity = result;
    self->reply_bell = reply_bell;
    self->doorbell = doorbell;
    self->generation = generation;
    self->hidden = hidden;
    self->direct = direct != 0;
    for (Py_ssize_t i = 0; i < slots; i++) {
        self->free[self->free_count++] = (int32_t)(end - 1 - i);
    }
    return (PyObject *)self;
}

void
lane_drop(Lane *lane)
{
    if (lane->view.obj != NULL && lane->released && lane->users == 0) {
        PyBuffer_Release(&lane->view);
        lane->view.obj = NULL;
    }
}

static void
lane_dealloc(Lane *lane)
{
    PyTypeObject *type = Py_TYPE((PyObject *)lane);
    if (lane->view.obj != NULL) {
        PyBuffer_Release(&lane->view);
    }
    PyObject_Free(lane);
    Py_DECREF(type);
}

int32_t
lane_pop(Lane *lane)
{
    return lane->free_count > 0 ? lane->free[--lane->free_count] : -1;
}

void
lane_push(Lane *lane, int32_t slot)
{
    /* A full list means that a slot was given twice, which the caller reports. */
    if (lane->free_count < MOST_SLOTS) {
        lane->free[lane->free_count++] = slot;
    }
}

static PyObject *
lane_take(Lane *lane, PyObject *Py_UNUSED(ignored))
{
    return PyLong_FromLong(lane_pop(lane));
}

static PyObject *
lane_give(Lane *lane, PyObject *slot)
{
    long number = PyLong_AsLong(slot);
    if (number == -1 && PyErr_Occurred()) {
        return NULL;
    }
    lane_push(lane, (int32_t)number);
    Py_RETURN_NONE;
}

static PyObject *
lane_add_work(Lane *lane, PyObject *work)
{
    double more = PyFloat_AsDouble(work);
    if (more == -1.0 && PyErr_Occurred()) {
        return NULL;
    }
    lane->work += more;
    Py_RETURN_NONE;
}

static PyObject *
lane_set_times(Lane *lane, PyObject *args)
{
    PyObject *expected;
    if (!PyArg_ParseTuple(args, "Od:set_times", &expected, &lane->tail)) {
        return NULL;
    }
    Array array = {0};
    bool right = open_array(&array, expected, "expected", SIZE_CLASSES, 8, false);
    if (right) {
        memcpy(lane->expected_s, array.view.buf, sizeof(lane->expected_s));
    }
    close_arrays(&array, 1);
    return right ? Py_NewRef(Py_None) : NULL;
}

static PyObject *
lane_stop(Lane *lane, PyObject *Py_UNUSED(ignored))
{
    lane->stopped = true;
    Py_RETURN_NONE;
}

static PyObject *
lane_leave(Lane *lane, PyObject *Py_UNUSED(ignored))
{
    if (lane->users <= 0) {
        PyErr_SetString(PyExc_ValueError, "nobody uses the lane");
        return NULL;
    }
    lane->users--;
    lane_drop(lane);
    Py_RETURN_NONE;
}

static PyObject *
lane_users(Lane *lane, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(lane->users);
}

static PyObject *
lane_release(Lane *lane, PyObject *Py_UNUSED(ignored))
{
    lane->stopped = lane->released = true;
    lane_drop(lane);
    Py_RETURN_NONE;
}

static PyObject *
lane_free(Lane *lane, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(lane->free_count);
}

static PyObject *
lane_work(Lane *lane, void *Py_UNUSED(closure))
{
    return PyFloat_FromDouble(lane->work);
}

static PyObject *
lane_writers(Lane *lane, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(lane->writers);
}

static PyMethodDef lane_methods[] = {
    {"take", (PyCFunction)lane_take, METH_NOARGS, "take() -> a free slot, or -1"},
    {"give", (PyCFunction)lane_give, METH_O, "give(slot): the slot is free"},
    {"add_work", (PyCFunction)lane_add_work, METH_O, "add_work(work): change the work in flight"},
    {"set_times", (PyCFunction)lane_set_times, METH_VARARGS, "set_times(expected, tail)"},
    {"leave", (PyCFunction)lane_leave, METH_NOARGS, "leave(): a request that was handed over has an owner"},
    {"stop", (PyCFunction)lane_stop, METH_NOARGS, "stop(): no exchange uses the lane any more"},
    {"release", (PyCFunction)lane_release, METH_NOARGS, "release(): drop the buffer once no exchange uses it"},
    {NULL, NULL, 0, NULL},
};

static PyObject *
lane_abandoned(Lane *lane, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(lane->abandoned);
}

static int
lane_set_abandoned(Lane *lane, PyObject *value, void *Py_UNUSED(closure))
{
    Py_ssize_t abandoned = value == NULL ? -1 : PyLong_AsSsize_t(value);
    if (abandoned < 0) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "abandoned must not be negative");
        }
        return -1;
    }
    lane->abandoned = abandoned;
    return 0;
}

static PyGetSetDef lane_getset[] = {
    {"abandoned", (getter)lane_abandoned, (setter)lane_set_abandoned, "abandoned requests without an answer", NULL},
    {"free", (getter)lane_free, NULL, "number of free slots", NULL},
    {"work", (getter)lane_work, NULL, "work in flight", NULL},
    {"users", (getter)lane_users, NULL, "requests of exchanges, in flight or handed over", NULL},
    {"writers", (getter)lane_writers, NULL, "exchanges that write a request now", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot lane_slots[] = {
    {Py_tp_new, lane_new},         {Py_tp_dealloc, lane_dealloc}, {Py_tp_methods, lane_methods},
    {Py_tp_getset, lane_getset}, {Py_tp_doc, "see _exchange.pyi"}, {0, NULL},
};

PyType_Spec lane_spec = {
    .name = "attention_client.exchange._exchange.Lane",
    .basicsize = sizeof(Lane),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = lane_slots,
};

