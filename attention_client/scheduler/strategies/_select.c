/* Python bindings of the selection loops (select.h): arrays in, indices out. Every length and index is checked.
 *
 * Scratch memory is allocated here: a few kilobytes per decision.
 */
#include "../../../eaas/minmax/arrays.h"
#include "select.h"

#include <stdlib.h>
#include <string.h>

enum { MOST = 1 << 20 }; /* requests, experts, replicas: keeps every product below in range */

typedef struct {
    Py_ssize_t window, experts, have, take;
    Array rows, start, chosen;
    double *load_E;
    int64_t *left;
} Choice;

/* Opens the arguments that all choices share and copies the start load. */
static bool
open_choice(Choice *choice, PyObject *rows, PyObject *start, PyObject *chosen)
{
    if (choice->window < 1 || choice->window > MOST || choice->experts < 1 || choice->experts > MOST ||
        choice->have < 0 || choice->take < choice->have || choice->window < choice->take) {
        PyErr_SetString(PyExc_ValueError, "window, experts, have or take out of range");
        return false;
    }
    if (!open_array(&choice->rows, rows, "window", choice->window * choice->experts, 8, false) ||
        (start != Py_None && !open_array(&choice->start, start, "start", choice->experts, 8, false)) ||
        !open_array(&choice->chosen, chosen, "chosen", choice->take, 8, true)) {
        return false;
    }
    const int64_t *indices = choice->chosen.view.buf;
    for (Py_ssize_t c = 0; c < choice->have; c++) {
        if (indices[c] < 0 || indices[c] >= choice->window) {
            PyErr_Format(PyExc_IndexError, "request %lld of %zd", (long long)indices[c], choice->window);
            return false;
        }
    }
    choice->load_E = calloc((size_t)choice->experts, sizeof(double));
    choice->left = malloc((size_t)choice->window * sizeof(int64_t));
    if (choice->load_E == NULL || choice->left == NULL) {
        PyErr_NoMemory();
        return false;
    }
    if (choice->start.open) {
        memcpy(choice->load_E, choice->start.view.buf, (size_t)choice->experts * sizeof(double));
    }
    return true;
}

static void
close_choice(Choice *choice)
{
    close_arrays(&choice->rows, 1);
    close_arrays(&choice->start, 1);
    close_arrays(&choice->chosen, 1);
    free(choice->load_E);
    free(choice->left);
}

/* ---- greedy -------------------------------------------------------------------------------------------------- */

static PyObject *
select_greedy(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *rows, *start, *chosen, *draws;
    Py_ssize_t sample;
    Objective objective;
    Choice choice = {0};
    if (!PyArg_ParseTuple(args, "OnnOOnndddOn:greedy", &rows, &choice.window, &choice.experts, &start, &chosen,
                          &choice.have, &choice.take, &objective.square, &objective.level, &objective.variance, &draws,
                          &sample)) {
        return NULL;
    }
    Array drawn = {0};
    PyObject *answer = NULL;
    double *terms = NULL;
    if (draws != Py_None && (sample < 1 || sample > MOST)) {
        PyErr_SetString(PyExc_ValueError, "sample out of range");
        return NULL;
    }
    if (!open_choice(&choice, rows, start, chosen) ||
        (draws != Py_None &&
         !open_array(&drawn, draws, "draws", (choice.take - choice.have) * sample, 8, false))) {
        goto done;
    }
    const double *draws_D = drawn.open ? drawn.view.buf : NULL;
    for (Py_ssize_t d = 0; drawn.open && d < (choice.take - choice.have) * sample; d++) {
        if (!(draws_D[d] >= 0 && draws_D[d] < 1)) {
            PyErr_SetString(PyExc_ValueError, "draws: a number outside [0, 1)");
            goto done;
        }
    }
    terms = malloc(2 * (size_t)choice.window * sizeof(double));
    if (terms == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    choose_greedily(choice.rows.view.buf, choice.window, choice.experts, &objective, draws_D, sample, choice.load_E,
                    terms, choice.left, choice.chosen.view.buf, choice.have, choice.take);
    double sum, squares;
    measure(choice.load_E, choice.experts, &sum, &squares);
    answer = Py_BuildValue("dd", sum, squares);
done:
    free(terms);
    close_arrays(&drawn, 1);
    close_choice(&choice);
    return answer;
}

/* ---- least peak -------------------------------------------------------------------------------------------------- */

static PyObject *
select_least_peak(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *rows, *start, *chosen;
    Choice choice = {0};
    if (!PyArg_ParseTuple(args, "OnnOOnn:least_peak", &rows, &choice.window, &choice.experts, &start, &chosen,
                          &choice.have, &choice.take)) {
        return NULL;
    }
    PyObject *answer = NULL;
    double *peaks = NULL;
    if (open_choice(&choice, rows, start, chosen)) {
        peaks = malloc((size_t)choice.window * sizeof(double));
        if (peaks == NULL) {
            PyErr_NoMemory();
        } else {
            choose_least_peak(choice.rows.view.buf, choice.window, choice.experts, choice.load_E, peaks, choice.left,
                              choice.chosen.view.buf, choice.have, choice.take);
            answer = Py_NewRef(Py_None);
        }
    }
    free(peaks);
    close_choice(&choice);
    return answer;
}

/* ---- by the time of the expert servers --------------------------------------------------------------------------- */

typedef struct {
    Servers servers;
    Array expert, share, first;
} Placed;

static bool
open_servers(Placed *placed, Py_ssize_t experts, PyObject *expert, PyObject *share, PyObject *first)
{
    Servers *servers = &placed->servers;
    if (servers->replicas < 1 || servers->replicas > MOST || servers->servers < 1 || servers->servers > MOST) {
        PyErr_SetString(PyExc_ValueError, "replicas or servers out of range");
        return false;
    }
    if (servers->layers < 1 || servers->servers % servers->layers != 0) {
        PyErr_SetString(PyExc_ValueError, "servers: must be as many in each layer");
        return false;
    }
    if (!open_array(&placed->expert, expert, "expert", servers->replicas, 4, false) ||
        !open_array(&placed->share, share, "share", servers->replicas, 8, false) ||
        !open_array(&placed->first, first, "first", servers->servers + 1, 8, false)) {
        return false;
    }
    servers->expert_R = placed->expert.view.buf;
    servers->share_R = placed->share.view.buf;
    servers->first_S = placed->first.view.buf;
    for (Py_ssize_t r = 0; r < servers->replicas; r++) {
        if (servers->expert_R[r] < 0 || servers->expert_R[r] >= experts) {
            PyErr_Format(PyExc_IndexError, "expert %d of %zd", (int)servers->expert_R[r], experts);
            return false;
        }
    }
    bool sorted = servers->first_S[0] == 0 && servers->first_S[servers->servers] == servers->replicas;
    for (Py_ssize_t s = 0; s < servers->servers; s++) {
        sorted = sorted && servers->first_S[s] <= servers->first_S[s + 1];
    }
    if (!sorted) {
        PyErr_SetString(PyExc_ValueError, "first: must rise from 0 to the number of replicas");
    }
    return sorted;
}

static void
close_servers(Placed *placed)
{
    close_arrays(&placed->expert, 1);
    close_arrays(&placed->share, 1);
    close_arrays(&placed->first, 1);
}

static PyObject *
select_for_servers(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *rows, *start, *chosen, *expert, *share, *first;
    Choice choice = {0};
    Placed placed = {0};
    if (!PyArg_ParseTuple(args, "OnnOOnnOOnOnndd:for_servers", &rows, &choice.window, &choice.experts, &start, &chosen,
                          &choice.have, &choice.take, &expert, &share, &placed.servers.replicas, &first,
                          &placed.servers.servers, &placed.servers.layers, &placed.servers.load_s,
                          &placed.servers.pair_s)) {
        return NULL;
    }
    PyObject *answer = NULL;
    float *scratch = NULL;
    if (open_choice(&choice, rows, start, chosen) && open_servers(&placed, choice.experts, expert, share, first)) {
        scratch = malloc(folded_floats(&placed.servers, choice.window, choice.experts) * sizeof(float));
        if (scratch == NULL) {
            PyErr_NoMemory();
        } else {
            choose_for_servers(choice.rows.view.buf, choice.window, choice.experts, &placed.servers, choice.load_E,
                               scratch, choice.left, choice.chosen.view.buf, choice.have, choice.take);
            add_rows(choice.load_E, choice.rows.view.buf, choice.experts, choice.chosen.view.buf, choice.take);
            answer = PyFloat_FromDouble(step_time(&placed.servers, choice.load_E));
        }
    }
    free(scratch);
    close_servers(&placed);
    close_choice(&choice);
    return answer;
}

static PyObject *
select_compare_orders(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *rows, *expert, *share, *first;
    Py_ssize_t window, experts, batch;
    Placed placed = {0};
    if (!PyArg_ParseTuple(args, "OnnnOOnOnndd:compare_orders", &rows, &window, &experts, &batch, &expert, &share,
                          &placed.servers.replicas, &first, &placed.servers.servers, &placed.servers.layers,
                          &placed.servers.load_s, &placed.servers.pair_s)) {
        return NULL;
    }
    if (window < 1 || window > MOST || experts < 1 || experts > MOST || batch < 1 || batch > window) {
        PyErr_SetString(PyExc_ValueError, "window, experts or batch out of range");
        return NULL;
    }
    Array array = {0};
    PyObject *answer = NULL;
    float *scratch = NULL;
    int64_t *left = NULL;
    if (open_array(&array, rows, "window", window * experts, 8, false) &&
        open_servers(&placed, experts, expert, share, first)) {
        scratch = malloc(folded_floats(&placed.servers, window, experts) * sizeof(float));
        left = malloc((size_t)window * sizeof(int64_t));
        if (scratch == NULL || left == NULL) {
            PyErr_NoMemory();
        } else {
            double by_age, by_choice;
            compare_orders(array.view.buf, window, experts, &placed.servers, batch, scratch, left, &by_age, &by_choice);
            answer = Py_BuildValue("dd", by_age, by_choice);
        }
    }
    free(left);
    free(scratch);
    close_servers(&placed);
    close_arrays(&array, 1);
    return answer;
}

static PyObject *
select_step_time(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *load, *expert, *share, *first;
    Py_ssize_t experts;
    Placed placed = {0};
    if (!PyArg_ParseTuple(args, "OnOOnOnndd:step_time", &load, &experts, &expert, &share, &placed.servers.replicas,
                          &first, &placed.servers.servers, &placed.servers.layers, &placed.servers.load_s,
                          &placed.servers.pair_s)) {
        return NULL;
    }
    Array row = {0};
    PyObject *answer = NULL;
    if (open_array(&row, load, "load", experts, 8, false) && open_servers(&placed, experts, expert, share, first)) {
        answer = PyFloat_FromDouble(step_time(&placed.servers, row.view.buf));
    }
    close_servers(&placed);
    close_arrays(&row, 1);
    return answer;
}

/* ---- differencing ------------------------------------------------------------------------------------------------ */

static PyObject *
select_difference(PyObject *self, PyObject *args)
{
    (void)self;
    PyObject *rows, *group_out;
    Py_ssize_t window, experts, groups;
    if (!PyArg_ParseTuple(args, "OnnnO:difference", &rows, &window, &experts, &groups, &group_out)) {
        return NULL;
    }
    if (window < 1 || window > MOST || experts < 1 || experts > MOST || groups < 1 || window % groups != 0) {
        PyErr_SetString(PyExc_ValueError, "window, experts or groups out of range");
        return NULL;
    }
    Array arrays[2] = {0};
    PyObject *answer = NULL;
    double *scratch = NULL;
    if (open_array(&arrays[0], rows, "window", window * experts, 8, false) &&
        open_array(&arrays[1], group_out, "group_out", window, 8, true)) {
        size_t doubles = (size_t)window * (size_t)experts + 2 * (size_t)window;
        scratch = malloc(doubles * sizeof(double) + 4 * (size_t)window * sizeof(int64_t));
        if (scratch == NULL) {
            PyErr_NoMemory();
        } else {
            split_by_difference(arrays[0].view.buf, window, experts, groups, scratch, (int64_t *)(scratch + doubles),
                                arrays[1].view.buf);
            answer = Py_NewRef(Py_None);
        }
    }
    free(scratch);
    close_arrays(arrays, COUNT_OF(arrays));
    return answer;
}

/* ---- the module ---------------------------------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"greedy", select_greedy, METH_VARARGS, NULL},
    {"least_peak", select_least_peak, METH_VARARGS, NULL},
    {"for_servers", select_for_servers, METH_VARARGS, NULL},
    {"compare_orders", select_compare_orders, METH_VARARGS, NULL},
    {"step_time", select_step_time, METH_VARARGS, NULL},
    {"difference", select_difference, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_select", .m_size = 0, .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__select(void)
{
    return PyModuleDef_Init(&module);
}
