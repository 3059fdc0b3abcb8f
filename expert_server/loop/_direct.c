/* The Python class of the direct path (slots.h). */
#include "slots.h"

/* ---- the Python class ----------------------------------------------------------------------------------- */

/* One item of `size` bytes for each slot, and writable as the arena is. */
static bool
open_view(Py_buffer *view, PyObject *buffer, Py_ssize_t length)
{
    if (PyObject_GetBuffer(buffer, view, PyBUF_WRITABLE) < 0) {
        view->obj = NULL;
        return false;
    }
    if (length >= 0 && view->len != length) {
        PyErr_SetString(PyExc_ValueError, "the owners do not match the slots");
        return false;
    }
    return true;
}

/* The sizes are those of an `Arena`; only a wrong caller fails here. */
static bool
lies_in_buffer(const Direct *self, Py_ssize_t flags_offset, Py_ssize_t bells_offset, Py_ssize_t slots_offset,
               Py_ssize_t result_stride)
{
    const SlotLimits *limits = &self->limits;
    Py_ssize_t lines = self->count * LINE_BYTES;
    return self->count > 0 && self->count < self->view.len / LINE_BYTES && slots_offset < self->view.len &&
           (int64_t)(limits->payload_capacity | limits->result_capacity) >= 0 &&
           (Py_ssize_t)(self->request_stride | (size_t)result_stride) >= 0 && flags_offset >= 0 && bells_offset >= flags_offset + lines &&
           slots_offset >= bells_offset + lines + LINE_BYTES &&
           self->request_stride >= sizeof(RequestHeader) + limits->payload_capacity &&
           (size_t)result_stride >= sizeof(ResultHeader) + limits->result_capacity &&
           ((self->request_stride | self->slot_stride | (size_t)slots_offset) % WIRE_ALIGNMENT) == 0 &&
           (((size_t)flags_offset | (size_t)bells_offset | (uintptr_t)self->view.buf) % LINE_BYTES) == 0 &&
           (size_t)(self->view.len - slots_offset) / self->slot_stride >= (size_t)self->count;
}

static PyObject *
direct_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer", "count", "offsets", "strides", "limits", "layers", "owners", NULL};
    PyObject *buffer;
    PyObject *busy;
    PyObject *generations;
    PyObject *bells;
    PyObject *capacities;
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
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "On(nnn)(nn)(nnnn)O(OOOO):Direct", names, &buffer, &count,
                                     &flags_offset, &bells_offset, &slots_offset, &request_stride,
                                     &result_stride, &payload, &result, &hidden, &num_layers, &layers, &busy,
                                     &generations, &bells, &capacities)) {
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
    if (!open_view(&self->view, buffer, -1) || !open_view(&self->owners.busy, busy, count) ||
        !open_view(&self->owners.generations, generations, count * (Py_ssize_t)sizeof(uint64_t)) ||
        !open_view(&self->owners.bells, bells, count * (Py_ssize_t)sizeof(int32_t)) ||
        !open_view(&self->owners.capacities, capacities, 2 * count * (Py_ssize_t)sizeof(uint64_t))) {
        Py_DECREF(self);
        return NULL;
    }
    self->count = count;
    self->request_stride = (size_t)request_stride;
    self->slot_stride = (size_t)request_stride + (size_t)result_stride;
    self->limits = (SlotLimits){(uint64_t)payload, (uint64_t)result, (uint64_t)hidden, (uint64_t)num_layers};
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
    drop_buffers(self);
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
    if (!accept_slot(self, slot, generation)) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(II)", self->request.header.layer, self->request.header.batch_size);
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
    if (self->request.layer == NULL || self->released || self->in_use) {
        PyErr_SetString(PyExc_ValueError, "no request is accepted");
        return NULL;
    }
    double ended = 0.0;
    if (!answer_accepted(self, bell, seen_at, &ended)) {
        Py_RETURN_NONE;
    }
    return PyFloat_FromDouble(ended);
}

static PyObject *
direct_leave(Direct *self, PyObject *Py_UNUSED(ignored))
{
    self->leaving = true;
    Py_RETURN_NONE;
}

static PyObject *
direct_doing(Direct *self, void *Py_UNUSED(closure))
{
    return Py_BuildValue("(dI)", self->since, self->doing);
}

static PyObject *
direct_release(Direct *self, PyObject *Py_UNUSED(ignored))
{
    self->released = true;
    Py_CLEAR(self->request.layer);
    if (!self->in_use) {
        drop_buffers(self);
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
    {"serve", FAST(direct_serve), METH_FASTCALL, "serve(spin_us, idle_us, most_us, once): see _direct.pyi"},
    {"leave", (PyCFunction)direct_leave, METH_NOARGS, "leave(): `serve` returns after the current request"},
    {"release", (PyCFunction)direct_release, METH_NOARGS, "release(): drop the buffer"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef direct_getters[] = {
    {"answered", (getter)direct_answered, NULL, "requests answered so far", NULL},
    {"doing", (getter)direct_doing, NULL, "what serve does: (since, tokens)", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot direct_slots[] = {
    {Py_tp_new, direct_new},
    {Py_tp_dealloc, direct_dealloc},
    {Py_tp_methods, direct_methods},
    {Py_tp_getset, direct_getters},
    {Py_tp_doc, "see _direct.pyi"},
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
