/* `attend`: attention of a batch to the paged cache, with the batch's tensors checked. */
#include <stdlib.h>
#include <time.h>

#include "../../../../eaas/threads/pool.h"
#include "../../../exchange/tensors.h"
#include "attend.h"

typedef struct {
    Tensor q, k, v, out, k_cache, v_cache, tables, begins, past, sinks;
    bool has_sinks;
} Tensors;

/* Read the arguments. Returns what is wrong with them, or NULL. */
static const char *
read_arguments(PyObject *const *args, Tensors *t)
{
    if (!read_tensor(args[0], 4, &t->q) || !read_tensor(args[1], 4, &t->k) || !read_tensor(args[2], 4, &t->v) ||
        !read_tensor(args[3], 4, &t->out)) {
        return "q, k, v and out must be tensors of 4 dimensions on the CPU";
    }
    if (!read_tensor(args[4], 3, &t->k_cache) || !read_tensor(args[5], 3, &t->v_cache)) {
        return "the caches must be tensors of 3 dimensions on the CPU";
    }
    if (!read_tensor(args[6], 2, &t->tables) || !read_tensor(args[7], 1, &t->begins) ||
        !read_tensor(args[8], 1, &t->past)) {
        return "tables, begins and past must be tensors of 2, 1 and 1 dimensions on the CPU";
    }
    t->has_sinks = args[14] != Py_None;
    if (t->has_sinks && (!read_tensor(args[14], 1, &t->sinks) || t->sinks.values != FLOAT32_VALUES ||
                         !is_contiguous(&t->sinks) || t->sinks.size[0] != t->q.size[1])) {
        return "sinks must be float32, one of each head";
    }
    Py_ssize_t tokens = t->q.size[2], heads = t->q.size[1], kv_heads = t->k.size[1];
    Py_ssize_t size = t->q.size[3], v_size = t->v.size[3];
    Values values = t->q.values;
    if ((values != FLOAT32_VALUES && values != BFLOAT16_VALUES) || t->k.values != values || t->v.values != values ||
        t->out.values != values || t->k_cache.values != values || t->v_cache.values != values) {
        return "q, k, v, out and the caches must all be float32 or all bfloat16";
    }
    if (t->q.size[0] != 1 || t->k.size[0] != 1 || t->v.size[0] != 1 || size < 1 || size > MOST_HEAD_SIZE || v_size < 1 ||
        v_size > MOST_HEAD_SIZE || kv_heads < 1 || heads % kv_heads != 0 || t->v.size[1] != kv_heads ||
        t->k.size[2] != tokens || t->v.size[2] != tokens || t->k.size[3] != size) {
        return "q, k and v must be (1, heads, tokens, size) of one batch, with sizes up to 576";
    }
    if ((size > 1 && (t->q.stride[3] != 1 || t->k.stride[3] != 1)) || (v_size > 1 && t->v.stride[3] != 1) ||
        !is_contiguous(&t->out) || t->out.size[0] != 1 || t->out.size[1] != tokens || t->out.size[2] != heads ||
        t->out.size[3] != v_size) {
        return "out must be (1, tokens, heads, size) and contiguous, and so must be the heads of q, k and v";
    }
    if (t->k_cache.size[1] != kv_heads || t->v_cache.size[1] != kv_heads || t->k_cache.size[2] != size ||
        t->v_cache.size[2] != v_size || (size > 1 && t->k_cache.stride[2] != 1) ||
        (v_size > 1 && t->v_cache.stride[2] != 1)) {
        return "the caches must be (rows, kv_heads, size), with contiguous heads";
    }
    if (t->tables.values != INT32_VALUES || t->begins.values != INT32_VALUES || t->past.values != INT32_VALUES ||
        !is_contiguous(&t->tables) || !is_contiguous(&t->begins) || !is_contiguous(&t->past) ||
        t->tables.size[0] != t->past.size[0] || t->begins.size[0] != t->past.size[0] + 1) {
        return "tables, begins and past must be contiguous int32 of the same sequences";
    }
    return NULL;
}

static Sequence
sequence_of(const Tensors *t, Py_ssize_t index)
{
    const int32_t *begins = (const int32_t *)t->begins.data, *past = (const int32_t *)t->past.data;
    ptrdiff_t count = begins[index + 1] - begins[index];
    return (Sequence){index, begins[index], count, past[index], 0, count, 0, t->k.size[1]};
}

/* Whether the batch's tokens and their blocks exist. */
static bool
is_in_bounds(const Tensors *t, const Layer *layer)
{
    Py_ssize_t next = 0;
    for (Py_ssize_t s = 0; s < t->past.size[0]; s++) {
        Sequence sequence = sequence_of(t, s);
        if (sequence.first != next || sequence.count < 0 || sequence.past < 0 || !has_rows(layer, &sequence)) {
            return false;
        }
        next += sequence.count;
    }
    return next <= t->q.size[2];
}

/* ---- threads ----------------------------------------------------------------------------------------------- */


static void
free_pool(PyObject *capsule)
{
    Pool *pool = PyCapsule_GetPointer(capsule, POOL_CAPSULE);
    Py_BEGIN_ALLOW_THREADS
    pool_destroy(pool);
    Py_END_ALLOW_THREADS
}

static PyObject *
paged_pool(PyObject *Py_UNUSED(module), PyObject *argument)
{
    int threads = (int)PyLong_AsLong(argument);
    if (threads < 1) {
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "%d threads", threads);
    }
    Pool *pool = pool_create(threads, true);
    if (pool == NULL) {
        return PyErr_Format(PyExc_OSError, "no %d threads can be started", threads);
    }
    return PyCapsule_New(pool, POOL_CAPSULE, free_pool);
}

typedef struct {
    const Layer *layer;
    Sequence *parts;
} Work;

static void
attend_part(void *context, int task, int Py_UNUSED(thread))
{
    const Work *work = context;
    attend(work->layer, &work->parts[task]);
}

/* Cut the sequences into tasks. Returns their number, or -1 if there is no memory. `bytes`: read by all of them. */
static int
cut(const Tensors *t, const Layer *layer, ptrdiff_t threads, Sequence **parts, size_t *bytes)
{
    const ptrdiff_t tokens = task_tokens(layer, threads, t->q.size[2]);
    Py_ssize_t most = (t->past.size[0] + t->q.size[2] / tokens) * layer->kv_heads;
    *parts = malloc((size_t)(most ? most : 1) * sizeof **parts);
    if (*parts == NULL) {
        return -1;
    }
    int count = 0;
    for (Py_ssize_t s = 0; s < t->past.size[0]; s++) {
        Sequence part = sequence_of(t, s);
        /* The last ones see the most keys: threads that begin with them end together. */
        for (ptrdiff_t to = part.count; to > 0; to = part.from) {
            part.to = to;
            part.from = (to - 1) / tokens * tokens;
            ptrdiff_t keys = part.past + part.to;
            keys = layer->window > 0 && keys > layer->window ? layer->window : keys;
            ptrdiff_t values = keys * layer->kv_heads * (layer->head_size + layer->v_size);
            *bytes += (size_t)values * (layer->bfloat16 ? 2 : 4);
            /* The heads of one token are read together, unless threads would have nothing to do. */
            ptrdiff_t shares = threads > t->past.size[0] ? threads / t->past.size[0] : 1;
            ptrdiff_t heads = is_one(layer, &part) ? (layer->kv_heads + shares - 1) / shares : 1;
            for (part.head = 0; part.head < layer->kv_heads; part.head = part.end_head) {
                part.end_head = part.head + heads < layer->kv_heads ? part.head + heads : layer->kv_heads;
                (*parts)[count++] = part;
            }
        }
    }
    return count;
}

static double
now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

/* Returns whether there was memory for it. */
static bool
attend_all(const Tensors *t, const Layer *layer, Pool *pool)
{
    Work work = {layer, NULL};
    size_t bytes = 0;
    int tasks = cut(t, layer, pool == NULL ? 1 : pool_threads(pool), &work.parts, &bytes);
    if (tasks < 0) {
        return false;
    }
    bool alone = pool == NULL || tasks < 2 || pool_is_better_alone(pool, bytes);
    double began = now_ns();
    if (alone) {
        for (int task = 0; task < tasks; task++) {
            attend(layer, &work.parts[task]);
        }
    }
    else {
        pool_run(pool, attend_part, &work, tasks);
    }
    if (pool != NULL && tasks > 1) {
        pool_learn(pool, bytes, alone, now_ns() - began);
    }
    free(work.parts);
    /* Afterwards: with a window, new keys take the places of keys that other tasks may still read. */
    for (Py_ssize_t s = 0; s < t->past.size[0]; s++) {
        Sequence sequence = sequence_of(t, s);
        write_new(layer, &sequence);
    }
    return true;
}

static PyObject *
paged_attend(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count != 16) {
        PyErr_SetString(PyExc_TypeError, "attend takes 16 arguments: see _paged.pyi");
        return NULL;
    }
    Pool *pool = args[15] == Py_None ? NULL : PyCapsule_GetPointer(args[15], POOL_CAPSULE);
    Layer layer = {
        .block_rows = PyLong_AsSsize_t(args[9]),
        .page = PyLong_AsSsize_t(args[10]),
        .window = PyLong_AsSsize_t(args[11]),
        .scale = (float)PyFloat_AsDouble(args[12]),
        .softcap = (float)PyFloat_AsDouble(args[13]),
    };
    if (PyErr_Occurred()) {
        return NULL;
    }
    Tensors t;
    const char *wrong = read_arguments(args, &t);
    if (wrong == NULL && (layer.page < 1 || layer.block_rows < layer.page || layer.window < 0)) {
        wrong = "page, block_rows or window is out of range";
    }
    if (wrong != NULL) {
        PyErr_SetString(PyExc_ValueError, wrong);
        return NULL;
    }
    layer.bfloat16 = t.q.values == BFLOAT16_VALUES;
    layer.heads = t.q.size[1];
    layer.kv_heads = t.k.size[1];
    layer.head_size = t.q.size[3];
    layer.v_size = t.v.size[3];
    layer.q = t.q.data;
    layer.k = t.k.data;
    layer.v = t.v.data;
    layer.q_token = t.q.stride[2];
    layer.q_head = t.q.stride[1];
    layer.k_token = t.k.stride[2];
    layer.k_head = t.k.stride[1];
    layer.v_token = t.v.stride[2];
    layer.v_head = t.v.stride[1];
    layer.out = t.out.data;
    layer.k_cache = t.k_cache.data;
    layer.v_cache = t.v_cache.data;
    layer.cache_rows = t.k_cache.size[0] < t.v_cache.size[0] ? t.k_cache.size[0] : t.v_cache.size[0];
    layer.k_cache_token = t.k_cache.stride[0];
    layer.k_cache_head = t.k_cache.stride[1];
    layer.v_cache_token = t.v_cache.stride[0];
    layer.v_cache_head = t.v_cache.stride[1];
    layer.tables = (const int32_t *)t.tables.data;
    layer.blocks = t.tables.size[1];
    layer.sinks = t.has_sinks ? (const float *)t.sinks.data : NULL;
    if (!is_in_bounds(&t, &layer)) {
        PyErr_SetString(PyExc_ValueError, "the sequences lie beyond the batch or the cache");
        return NULL;
    }
    bool done;
    Py_BEGIN_ALLOW_THREADS
    done = attend_all(&t, &layer, pool);
    Py_END_ALLOW_THREADS
    if (!done) {
        return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"attend", (PyCFunction)(void (*)(void))paged_attend, METH_FASTCALL, "see _paged.pyi"},
    {"pool", paged_pool, METH_O, "see _paged.pyi"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_paged", "Attention to a paged cache.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__paged(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && (!load_tensors() || PyModule_AddIntConstant(made, "reads_tensors", can_read_tensors()) < 0)) {
        Py_CLEAR(made);
    }
    return made;
}
