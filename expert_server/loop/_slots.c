/* The Python class of the slots (slots.h). */
#include "_slots.h"

/* The sizes are those of an `Arena`; only a wrong caller fails here. */
static bool
lies_in_buffer(const Slots *slots, const Py_buffer *view, const Py_ssize_t offsets[3], Py_ssize_t result_stride)
{
    const SlotLimits *limits = &slots->limits;
    Py_ssize_t lines = slots->count * LINE_BYTES;
    return slots->count > 0 && slots->count < view->len / LINE_BYTES && offsets[2] < view->len &&
           (int64_t)(limits->payload_capacity | limits->result_capacity) >= 0 &&
           (Py_ssize_t)(slots->request_stride | (size_t)result_stride) >= 0 && offsets[0] >= 0 &&
           offsets[1] >= offsets[0] + lines && offsets[2] >= offsets[1] + lines + LINE_BYTES &&
           slots->request_stride >= sizeof(RequestHeader) + limits->payload_capacity &&
           (size_t)result_stride >= sizeof(ResultHeader) + limits->result_capacity &&
           ((slots->request_stride | slots->slot_stride | (size_t)offsets[2]) % WIRE_ALIGNMENT) == 0 &&
           (((size_t)offsets[0] | (size_t)offsets[1] | (uintptr_t)view->buf) % LINE_BYTES) == 0 &&
           (size_t)(view->len - offsets[2]) / slots->slot_stride >= (size_t)slots->count;
}

static PyObject *
slots_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer", "count", "offsets", "strides", "limits", "layers", "owners", NULL};
    PyObject *buffers[BUFFERS], *layers;
    Py_ssize_t count, offsets[3], request_stride, result_stride, payload, result, hidden, num_layers;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "On(nnn)(nn)(nnnn)O!(OOOO):Slots", names, &buffers[ARENA], &count,
                                     &offsets[0], &offsets[1], &offsets[2], &request_stride, &result_stride, &payload,
                                     &result, &hidden, &num_layers, &PyList_Type, &layers, &buffers[BUSY],
                                     &buffers[GENERATIONS], &buffers[BELLS], &buffers[CAPACITIES])) {
        return NULL;
    }
    SlotsObject *self = (SlotsObject *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    Array *arrays = self->buffers;
    if (!open_items(&arrays[ARENA], buffers[ARENA], "buffer", 1, true) ||
        !open_array(&arrays[BUSY], buffers[BUSY], "busy", count, 1, true) ||
        !open_array(&arrays[GENERATIONS], buffers[GENERATIONS], "generations", count, sizeof(uint64_t), false) ||
        !open_array(&arrays[BELLS], buffers[BELLS], "doorbells", count, sizeof(int32_t), false) ||
        !open_array(&arrays[CAPACITIES], buffers[CAPACITIES], "capacities", 2 * count, sizeof(uint64_t), false)) {
        Py_DECREF(self);
        return NULL;
    }
    const Py_buffer *view = &arrays[ARENA].view;
    Slots *slots = &self->slots;
    slots->count = count;
    slots->request_stride = (size_t)request_stride;
    slots->slot_stride = (size_t)request_stride + (size_t)result_stride;
    slots->limits = (SlotLimits){(uint64_t)payload, (uint64_t)result, (uint64_t)hidden, (uint64_t)num_layers};
    if (!lies_in_buffer(slots, view, offsets, result_stride)) {
        PyErr_SetString(PyExc_ValueError, "these slots do not lie in the buffer");
        Py_DECREF(self);
        return NULL;
    }
    slots->flags = (FlagLine *)((char *)view->buf + offsets[0]);
    slots->doorbells = (Doorbell *)((char *)view->buf + offsets[1]);
    slots->memory = (char *)view->buf + offsets[2];
    slots->owners = (Owners){arrays[BUSY].view.buf, arrays[GENERATIONS].view.buf, arrays[BELLS].view.buf,
                             arrays[CAPACITIES].view.buf};
    slots->requests = PyMem_Calloc((size_t)count, sizeof(Request));
    if (slots->requests == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->layers = Py_NewRef(layers);
    return (PyObject *)self;
}

static void
drop_buffers(SlotsObject *self)
{
    close_arrays(self->buffers, BUFFERS);
    for (int i = 0; i < BUFFERS; i++) {
        self->buffers[i].open = false;
    }
}

static void
slots_dealloc(SlotsObject *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->layers);
    PyMem_Free(self->slots.requests);
    drop_buffers(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

PyObject *
prepared_layer(const SlotsObject *self, Py_ssize_t slot)
{
    Py_ssize_t layer = (Py_ssize_t)self->slots.requests[slot].header.layer;
    PyObject *capsule = layer < PyList_Size(self->layers) ? PyList_GetItem(self->layers, layer) : NULL;
    return capsule != NULL && PyCapsule_IsValid(capsule, DIRECT_LAYER) ? Py_NewRef(capsule) : NULL;
}

/* The index of a slot, or -1 with an exception. `least`: what `accept` must have found there. */
static Py_ssize_t
parse_slot(const SlotsObject *self, PyObject *object, Verdict least)
{
    Py_ssize_t slot = PyNumber_AsSsize_t(object, PyExc_IndexError);
    if (slot == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (slot < 0 || slot >= self->slots.count) {
        PyErr_Format(PyExc_IndexError, "slot %zd of %zd", slot, self->slots.count);
        return -1;
    }
    if (self->closed || self->in_use || self->slots.requests[slot].verdict < least) {
        PyErr_Format(PyExc_ValueError, "slot %zd: no such request is accepted, or the slots are closed", slot);
        return -1;
    }
    return slot;
}

static PyObject *
slots_accept(SlotsObject *self, PyObject *argument)
{
    Py_ssize_t slot = parse_slot(self, argument, NO_REQUEST);
    if (slot < 0) {
        return NULL;
    }
    Verdict verdict = accept_slot(&self->slots, slot);
    if (verdict == NO_REQUEST) {
        Py_RETURN_NONE;
    }
    const Request *request = &self->slots.requests[slot];
    const char *header = (const char *)&request->header;
    Py_ssize_t size = sizeof request->header;
    if (verdict != FAULTY) {
        return Py_BuildValue("(y#O)", header, size, Py_None);
    }
    return Py_BuildValue("(y#(sNN))", header, size, fault_words(request->fault),
                         PyBool_FromLong(is_frame_fault(request->fault)), PyBool_FromLong(is_misfit(request->fault)));
}

static PyObject *
slots_compute(SlotsObject *self, PyObject *argument)
{
    Py_ssize_t slot = parse_slot(self, argument, UNUSUAL);
    if (slot < 0) {
        return NULL;
    }
    PyObject *capsule = prepared_layer(self, slot);
    if (capsule == NULL) {
        Py_RETURN_FALSE;
    }
    const DirectLayer *layer = PyCapsule_GetPointer(capsule, DIRECT_LAYER);
    bool computed;
    self->in_use = true;
    Py_BEGIN_ALLOW_THREADS
    computed = compute_slot(&self->slots, slot, layer);
    Py_END_ALLOW_THREADS
    self->in_use = false;
    Py_DECREF(capsule);
    return PyBool_FromLong(computed);
}

static PyObject *
slots_write_answer(SlotsObject *self, PyObject *args)
{
    PyObject *index;
    unsigned int status;
    unsigned long long detail;
    double service_s, queue_s;
    if (!PyArg_ParseTuple(args, "OIKdd:write_answer", &index, &status, &detail, &service_s, &queue_s)) {
        return NULL;
    }
    Py_ssize_t slot = parse_slot(self, index, status == STATUS_OK ? UNUSUAL : FAULTY);
    if (slot < 0) {
        return NULL;
    }
    ResultHeader answer = write_answer(&self->slots, slot, (uint16_t)status, detail, service_s, queue_s);
    if ((self->slots.requests[slot].header.flags & CHECKSUM_FLAG) == 0) {
        Py_RETURN_NONE;
    }
    return PyBytes_FromStringAndSize((const char *)&answer, sizeof answer);
}

static PyObject *
slots_hand_over(SlotsObject *self, PyObject *argument)
{
    Py_ssize_t slot = parse_slot(self, argument, FAULTY);
    if (slot < 0) {
        return NULL;
    }
    hand_over(&self->slots, slot);
    Py_RETURN_NONE;
}

static PyObject *
slots_release(SlotsObject *self, PyObject *argument)
{
    Py_ssize_t slot = parse_slot(self, argument, FAULTY);
    if (slot < 0) {
        return NULL;
    }
    release_slot(&self->slots, slot);
    Py_RETURN_NONE;
}

static PyObject *
slots_leave(SlotsObject *self, PyObject *Py_UNUSED(ignored))
{
    self->leaving = true;
    Py_RETURN_NONE;
}

static PyObject *
slots_close(SlotsObject *self, PyObject *Py_UNUSED(ignored))
{
    if (self->in_use) {
        PyErr_SetString(PyExc_ValueError, "the slots are in use");
        return NULL;
    }
    self->closed = true;
    drop_buffers(self);
    Py_RETURN_NONE;
}

static PyObject *
slots_answered(SlotsObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(__atomic_load_n(&self->slots.answered, __ATOMIC_RELAXED));
}

static PyObject *
slots_doing(SlotsObject *self, void *Py_UNUSED(closure))
{
    return Py_BuildValue("(dI)", self->since, self->doing);
}

#define FAST(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef methods[] = {
    {"accept", (PyCFunction)slots_accept, METH_O, "accept(slot) -> (header, fault) or None"},
    {"compute", (PyCFunction)slots_compute, METH_O, "compute(slot) -> whether it could"},
    {"write_answer", (PyCFunction)slots_write_answer, METH_VARARGS,
     "write_answer(slot, status, detail, service_s, queue_s) -> header, if it needs a checksum"},
    {"hand_over", (PyCFunction)slots_hand_over, METH_O, "hand_over(slot): to its client"},
    {"release", (PyCFunction)slots_release, METH_O, "release(slot): end its claim"},
    {"serve", FAST(slots_serve), METH_FASTCALL, "serve(spin_us, idle_us, most_us, once): see _slots.pyi"},
    {"leave", (PyCFunction)slots_leave, METH_NOARGS, "leave(): `serve` returns after the current request"},
    {"close", (PyCFunction)slots_close, METH_NOARGS, "close(): drop the buffers"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getters[] = {
    {"answered", (getter)slots_answered, NULL, "requests answered with a result so far", NULL},
    {"doing", (getter)slots_doing, NULL, "what serve does: (since, tokens)", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, slots_new},
    {Py_tp_dealloc, slots_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getters},
    {Py_tp_doc, "see _slots.pyi"},
    {0, NULL},
};

static PyType_Spec type_spec = {
    .name = "expert_server.loop._slots.Slots",
    .basicsize = sizeof(SlotsObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = type_slots,
};

static int
module_exec(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &type_spec, NULL);
    if (type == NULL) {
        return -1;
    }
    int result = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return result;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_slots", .m_doc = "The server's verbs over slots.", .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__slots(void)
{
    return PyModuleDef_Init(&module_definition);
}
