/* Python bindings of the compiled kernel. Addresses are integers: native.py owns the memory. */
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>

#include "../direct.h"
#include "native.h"

#define POOL "expert_server.kernels._native.Pool"
#define READ_TASK_BYTES ((size_t)4 << 20)

static void free_pool(PyObject *capsule) {
    Pool *pool = PyCapsule_GetPointer(capsule, POOL);
    Py_BEGIN_ALLOW_THREADS
    pool_destroy(pool);
    Py_END_ALLOW_THREADS
}

static PyObject *create_pool(PyObject *self, PyObject *arguments) {
    (void)self;
    int threads, learns = false;
    if (!PyArg_ParseTuple(arguments, "i|p", &threads, &learns)) return NULL;
    if (threads < 1) return PyErr_Format(PyExc_ValueError, "%d threads", threads);
    Pool *pool = pool_create(threads, learns);
    if (pool == NULL) return PyErr_Format(PyExc_OSError, "no %d threads can be started", threads);
    return PyCapsule_New(pool, POOL, free_pool);
}

static PyObject *kinds(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && gemm_kinds[i].isa != NULL; i++) {
        if (!gemm_kinds[i].works()) continue;
        PyObject *kind = Py_BuildValue("(isii)", i, gemm_kinds[i].isa, (int)gemm_kinds[i].weights, (int)gemm_kinds[i].x);
        if (kind == NULL || PyList_Append(list, kind) < 0) Py_CLEAR(list);
        Py_XDECREF(kind);
    }
    return list;
}

static PyObject *scratch_bytes(PyObject *self, PyObject *arguments) {
    (void)self;
    int kind, threads, hidden, intermediate, tokens, top_k, num_experts;
    if (!PyArg_ParseTuple(arguments, "iiiiiii", &kind, &threads, &hidden, &intermediate, &tokens, &top_k,
                          &num_experts))
        return NULL;
    return PyLong_FromSize_t(
        moe_scratch_bytes(&gemm_kinds[kind], threads, hidden, intermediate, tokens, top_k, num_experts));
}

/* Reads what a layer's calls have in common; false: an exception is set. */
static bool parse_layer(PyObject *layer, Moe *moe) {
    int kind, activation, has_gate;
    unsigned long long experts, counts;
    PyObject *pool;
    if (!PyArg_ParseTuple(layer, "iOKiii(iiff)K", &kind, &pool, &experts, &moe->num_experts, &moe->hidden,
                          &moe->intermediate, &activation, &has_gate, &moe->activation.alpha, &moe->activation.limit,
                          &counts))
        return false;
    moe->kind = &gemm_kinds[kind];
    moe->pool = PyCapsule_GetPointer(pool, POOL);
    moe->experts = (const Expert *)experts;
    moe->activation.kind = (ActivationKind)activation;
    moe->activation.has_gate = has_gate != 0;
    moe->counts = (int64_t *)counts;
    return moe->pool != NULL;
}

static PyObject *run(PyObject *self, PyObject *arguments) {
    (void)self;
    int x_format, ids_are_wide;
    unsigned long long x, ids, scores, out, scratch;
    PyObject *layer;
    Moe moe = {0};
    if (!PyArg_ParseTuple(arguments, "O(Ki)(Kp)KiiKK", &layer, &x, &x_format, &ids, &ids_are_wide, &scores, &moe.tokens,
                          &moe.top_k, &out, &scratch) ||
        !parse_layer(layer, &moe))
        return NULL;
    moe.x = (const char *)x;
    moe.x_format = (Format)x_format;
    moe.ids = (const void *)ids;
    moe.ids_are_wide = ids_are_wide != 0;
    moe.scores = (const float *)scores;
    moe.out = (float *)out;
    moe.scratch = (char *)scratch;
    int64_t missing;
    Py_BEGIN_ALLOW_THREADS
    missing = moe_run(&moe);
    Py_END_ALLOW_THREADS
    return PyLong_FromLongLong(missing);
}

/* A layer for the loop's compiled code. */
typedef struct {
    DirectLayer base;
    Moe moe; /* All but the batch. */
    size_t scratch_bytes;
} PreparedLayer;

static bool run_prepared(const DirectLayer *base, const void *x, bool is_bfloat16, const int32_t *ids,
                         const float *scores, int tokens, int top_k, float *out) {
    const PreparedLayer *layer = (const PreparedLayer *)base;
    Moe moe = layer->moe;
    if (moe_scratch_bytes(moe.kind, pool_threads(moe.pool), moe.hidden, moe.intermediate, tokens, top_k,
                          moe.num_experts) > layer->scratch_bytes)
        return false;
    moe.x = x;
    moe.x_format = is_bfloat16 ? BFLOAT16 : FLOAT32;
    moe.ids = ids;
    moe.scores = scores;
    moe.tokens = tokens;
    moe.top_k = top_k;
    moe.out = out;
    return moe_run(&moe) == -1;
}

static void free_prepared(PyObject *capsule) {
    free(PyCapsule_GetPointer(capsule, DIRECT_LAYER));
    Py_DECREF((PyObject *)PyCapsule_GetContext(capsule));
}

static PyObject *prepare(PyObject *self, PyObject *arguments) {
    (void)self;
    unsigned long long scratch;
    Py_ssize_t scratch_bytes;
    PyObject *common, *kept;
    Moe moe = {0};
    if (!PyArg_ParseTuple(arguments, "O(Kn)O", &common, &scratch, &scratch_bytes, &kept) || !parse_layer(common, &moe))
        return NULL;
    moe.scratch = (char *)scratch;
    PreparedLayer *layer = malloc(sizeof *layer);
    if (layer == NULL) return PyErr_NoMemory();
    *layer = (PreparedLayer){{(uint32_t)moe.hidden, run_prepared}, moe, (size_t)scratch_bytes};
    PyObject *capsule = PyCapsule_New(layer, DIRECT_LAYER, NULL);
    /* It keeps `common` for the pool. The destructor last: it needs the context. */
    PyObject *all = Py_BuildValue("(OO)", common, kept);
    if (capsule == NULL || all == NULL || PyCapsule_SetContext(capsule, all) < 0 ||
        PyCapsule_SetDestructor(capsule, free_prepared) < 0) {
        free(layer);
        Py_XDECREF(all);
        Py_XDECREF(capsule);
        return NULL;
    }
    return capsule;
}

typedef uint64_t Vector __attribute__((vector_size(64)));

typedef struct {
    const char *at;
    size_t bytes;
} Span;

EACH_VECTOR_WIDTH
static void read_span(const char *at, size_t bytes) {
    Vector seen[4] = {{0}};
    const Vector *line = (const Vector *)at;
    for (size_t i = 0; i + 4 <= bytes / sizeof(Vector); i += 4) {
        __builtin_prefetch((const char *)(line + i) + 4096);
        __builtin_prefetch((const char *)(line + i) + 4096 + 64);
        __builtin_prefetch((const char *)(line + i) + 4096 + 128);
        __builtin_prefetch((const char *)(line + i) + 4096 + 192);
        for (int j = 0; j < 4; j++) seen[j] |= line[i + j];
    }
    __asm__ volatile("" ::"m"(seen));
}

static void read_task(void *context, int task, int thread) {
    (void)thread;
    const Span *span = context;
    const size_t begin = (size_t)task * READ_TASK_BYTES;
    read_span(span->at + begin, span->bytes - begin < READ_TASK_BYTES ? span->bytes - begin : READ_TASK_BYTES);
}

static PyObject *read_memory(PyObject *self, PyObject *arguments) {
    (void)self;
    PyObject *capsule;
    unsigned long long address;
    Py_ssize_t bytes;
    if (!PyArg_ParseTuple(arguments, "OKn", &capsule, &address, &bytes)) return NULL;
    Pool *pool = PyCapsule_GetPointer(capsule, POOL);
    if (pool == NULL) return NULL;
    Span span = {(const char *)address, (size_t)bytes};
    Py_BEGIN_ALLOW_THREADS
    pool_run(pool, read_task, &span, (int)((span.bytes + READ_TASK_BYTES - 1) / READ_TASK_BYTES));
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *pack(PyObject *self, PyObject *arguments) {
    (void)self;
    unsigned long long rows, out;
    Py_ssize_t stride, n, words, panel_words;
    if (!PyArg_ParseTuple(arguments, "KnnnKn", &rows, &stride, &n, &words, &out, &panel_words)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    pack_rows((const uint32_t *)rows, (size_t)stride, (size_t)n, (size_t)words, (uint32_t *)out, (size_t)panel_words);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *pack_quantized(PyObject *self, PyObject *arguments) {
    (void)self;
    int format, is_finite;
    unsigned long long at, scales, zeros, out;
    Py_ssize_t codes_stride, scales_stride, zeros_stride, n, panel_words;
    Codes codes;
    if (!PyArg_ParseTuple(arguments, "iii(Kn)(Kn)(Knb)nKn", &format, &codes.inputs, &codes.group, &at, &codes_stride,
                          &scales, &scales_stride, &zeros, &zeros_stride, &codes.zero, &n, &out, &panel_words))
        return NULL;
    codes.codes = (const uint8_t *)at;
    codes.codes_stride = (size_t)codes_stride;
    codes.scales = (const void *)scales;
    codes.scales_stride = (size_t)scales_stride;
    codes.zeros = (const uint8_t *)zeros;
    codes.zeros_stride = (size_t)zeros_stride;
    Py_BEGIN_ALLOW_THREADS
    is_finite = pack_codes(&codes, (Format)format, (size_t)n, (uint32_t *)out, (size_t)panel_words);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(is_finite);
}

static PyObject *formats(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && i < FORMATS; i++) {
        const Layout *layout = &layouts[i];
        const int group = layout->scales == OF_CHANNELS ? 0 : layout->group;
        PyObject *format = Py_BuildValue("(siNN)", layout->code, group, PyBool_FromLong(layout->zero_bits > 0),
                                         PyBool_FromLong(layout->scales == SHORTS));
        if (format == NULL || PyList_Append(list, format) < 0) Py_CLEAR(list);
        Py_XDECREF(format);
    }
    return list;
}

static PyObject *panel_bytes(PyObject *self, PyObject *arguments) {
    (void)self;
    int format, inputs;
    if (!PyArg_ParseTuple(arguments, "ii", &format, &inputs)) return NULL;
    return PyLong_FromSize_t(panel_bytes_of((Format)format, padded_k((Format)format, inputs)));
}

static PyMethodDef methods[] = {
    {"create_pool", create_pool, METH_VARARGS, 
     "create_pool(threads, learns=False) -> pool; ends with its last reference"},
    {"kinds", kinds, METH_NOARGS, "[(kind, isa, format of weights, format of x)] that work here, best first"},
    {"scratch_bytes", scratch_bytes, METH_VARARGS,
     "scratch_bytes(kind, threads, hidden, intermediate, tokens, top_k, num_experts) -> bytes"},
    {"run", run, METH_VARARGS,
     "run(layer, (x, format), (ids, are int64), scores, T, K, out, scratch) -> -1, or the id of an expert that is not held\n"
     "layer: (kind, pool, experts, E, H, I, (activation, has_gate, alpha, limit), counts or 0)"},
    {"prepare", prepare, METH_VARARGS,
     "prepare(layer, (scratch, bytes), owners of the memory) -> a layer for the loop's compiled code (direct.h)"},
    {"read", read_memory, METH_VARARGS, "read(pool, address, bytes): read memory once, with all threads"},
    {"pack", pack, METH_VARARGS,
     "pack(rows, stride, n, words, out, panel_words): rows of words into panels; sizes in words of 4 bytes"},
    {"pack_quantized", pack_quantized, METH_VARARGS,
     "pack_quantized(format, inputs, group, (codes, stride), (scales, stride), (zeros or 0, stride, zero), n, out,\n"
     "               panel_words)\n"
     "-> whether all scales are finite; QuantizedMatrix in quantized.py describes the arrays"},
    {"formats", formats, METH_NOARGS,
     "[(code, inputs of a scale, has zero points, has bfloat16 scales)] by the format's number"},
    {"panel_bytes", panel_bytes, METH_VARARGS, "panel_bytes(format, inputs) -> bytes of 16 packed output channels"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "The compiled expert kernel.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModule_Create(&module); }
