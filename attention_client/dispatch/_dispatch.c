/* Python bindings of the inner loops of dispatch and combine.
 *
 * For a layer call of 64 tokens, NumPy and torch take longer for their calls than for the work. Arrays in, arrays
 * out: `parts.py` and `policy.py` explain them. Every function checks all lengths and indices; the loops are in
 * route.c and combine.c.
 */
#include "../../eaas/minmax/arrays.h"
#include "deadlines.h"
#include "route.h"

#include <assert.h>
#include <stdlib.h>

/* A draw of a higher count has too few digits left. */
#define MOST_CALLS (UINT64_C(1) << 40)

/* combine.c */
PyObject *dispatch_combine(PyObject *self, PyObject *args);

/* (pairs left, [(server, rows, work), ...]) */
static PyObject *
shares_of_work(int64_t left, const Routed *routed, Py_ssize_t servers)
{
    PyObject *list = PyList_New(0);
    for (Py_ssize_t s = 0; list != NULL && s < servers; s++) {
        if (routed->count_S[s] == 0) {
            continue;
        }
        PyObject *item = Py_BuildValue("nLd", s, (long long)routed->count_S[s], routed->work_S[s]);
        if (item == NULL || PyList_Append(list, item) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(item);
    }
    return list == NULL ? NULL : Py_BuildValue("LN", (long long)left, list);
}

static PyObject *
route_checked(const Routing *routing, Routed *routed)
{
    ptrdiff_t wrong = find_wrong_expert(routing);
    if (wrong >= 0) {
        return PyErr_Format(PyExc_IndexError, "expert %lld of %zd", (long long)routing->ids_P[wrong], routing->experts);
    }
    size_t servers = (size_t)routing->servers;
    size_t counts_bytes = servers * (sizeof(int64_t) + 2 * sizeof(double));
    ptrdiff_t replicas = routing->first_X[routing->experts] - routing->first_X[0];
    char *memory = malloc(counts_bytes + route_workspace(routing->tokens * routing->top_k, routing->servers,
                                                         routing->experts, replicas));
    if (memory == NULL) {
        return PyErr_NoMemory();
    }
    routed->count_S = (int64_t *)memory;
    routed->work_S = (double *)(routed->count_S + servers);
    routed->pairs_S = routed->work_S + servers;
    int64_t left = route(routing, routed, memory + counts_bytes);
    assert(left >= 0);
    PyObject *answer = shares_of_work(left, routed, routing->servers);
    free(memory);
    return answer;
}

/* Open the three arrays of a layer's replicas, and check what they point to. */
static bool
open_replicas(Array *arrays, PyObject *firsts, PyObject *servers, PyObject *shares, Routing *routing)
{
    if (!open_array(&arrays[0], firsts, "firsts", routing->experts + 1, 4, false) ||
        !open_items(&arrays[1], servers, "held_by", 4, false) || !open_items(&arrays[2], shares, "shares", 4, false)) {
        return false;
    }
    routing->first_X = arrays[0].view.buf;
    routing->server_N = arrays[1].view.buf;
    routing->share_N = arrays[2].view.buf;
    if (arrays[1].view.len != arrays[2].view.len ||
        !are_replicas(routing->first_X, routing->experts, routing->server_N, arrays[1].view.len / 4, routing->servers)) {
        PyErr_SetString(PyExc_ValueError, "replicas out of range");
        return false;
    }
    return true;
}

static PyObject *
dispatch_plan(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *ids, *wanted, *firsts, *held_by, *shares, *rate, *backlog, *rows_out, *ids_out;
    unsigned long long call, layer;
    Routing r = {0};
    if (!PyArg_ParseTuple(args, "OOnnOOOnndKKOOOO:plan", &ids, &wanted, &r.tokens, &r.top_k, &firsts, &held_by,
                          &shares, &r.servers, &r.experts, &r.load_pairs, &call, &layer, &rate, &backlog, &rows_out,
                          &ids_out)) {
        return NULL;
    }
    if (r.tokens < 0 || r.top_k < 0 || r.servers < 0 || r.experts < 1 || r.experts > INT32_MAX ||
        !(r.load_pairs > 0 && r.load_pairs <= INT32_MAX) ||
        (r.top_k > 0 && r.tokens > INT32_MAX / r.top_k) || r.servers > INT32_MAX ||
        call > MOST_CALLS || layer > INT32_MAX || (rate == Py_None) != (backlog == Py_None)) {
        PyErr_SetString(PyExc_ValueError, "tokens, top_k, servers, experts, load_pairs, call or layer out of range");
        return NULL;
    }
    r.draw = draw_of(call, layer);
    Py_ssize_t pairs = r.tokens * r.top_k, most_rows = r.tokens * (r.servers < r.top_k ? r.servers : r.top_k);
    Array arrays[9] = {0};
    PyObject *answer = NULL;
    if (open_array(&arrays[0], ids, "ids", pairs, 8, false) &&
        open_array(&arrays[1], wanted, "wanted", pairs, 1, false) &&
        open_replicas(&arrays[2], firsts, held_by, shares, &r) &&
        (rate == Py_None || (open_array(&arrays[5], rate, "rate", r.servers, 8, false) &&
                             open_array(&arrays[6], backlog, "backlog", r.servers, 8, false))) &&
        open_array(&arrays[7], rows_out, "rows_out", most_rows, 8, true) &&
        open_array(&arrays[8], ids_out, "ids_out", most_rows * r.top_k, 4, true)) {
        r.ids_P = arrays[0].view.buf;
        r.wanted_P = arrays[1].view.buf;
        r.rate_S = arrays[5].open ? arrays[5].view.buf : NULL;
        r.backlog_S = arrays[6].open ? arrays[6].view.buf : NULL;
        Routed routed = {.rows_out = arrays[7].view.buf, .ids_out = arrays[8].view.buf, .most_rows = most_rows};
        answer = route_checked(&r, &routed);
    }
    close_arrays(arrays, COUNT_OF(arrays));
    return answer;
}

static PyObject *
dispatch_budget_s(PyObject *Py_UNUSED(self), PyObject *args)
{
    double usual_s, least_s, most_s;
    return PyArg_ParseTuple(args, "ddd:budget_s", &usual_s, &least_s, &most_s)
               ? PyFloat_FromDouble(budget_s(usual_s, least_s, most_s))
               : NULL;
}

static PyObject *
dispatch_hedge_s(PyObject *Py_UNUSED(self), PyObject *args)
{
    double usual_s, tail;
    return PyArg_ParseTuple(args, "dd:hedge_s", &usual_s, &tail) ? PyFloat_FromDouble(hedge_s(usual_s, tail)) : NULL;
}

static PyMethodDef methods[] = {
    {"plan", dispatch_plan, METH_VARARGS, NULL},
    {"combine", dispatch_combine, METH_VARARGS, NULL},
    {"budget_s", dispatch_budget_s, METH_VARARGS, NULL},
    {"hedge_s", dispatch_hedge_s, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int
module_exec(PyObject *module)
{
    return PyModule_AddIntConstant(module, "SIZE_CLASSES", SIZE_CLASSES);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_dispatch", .m_size = 0, .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__dispatch(void)
{
    return PyModuleDef_Init(&module);
}
