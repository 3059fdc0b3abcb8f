/* Python interface of the min-max split (flow.c): validates arrays and calls it for each batch.
 *
 * Letters: B batches, E experts, S servers.
 */
#include "arrays.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "flow.h"

#define EXACT 1e-9

/* ---- a placement ------------------------------------------------------------------------------------------ */

typedef struct {
    Py_ssize_t servers, experts;
    const double *shares_SE, *speed_S, *backlog_S; /* backlog_S: NULL for none */
    int32_t *first_S;
    void *block; /* the flow's arrays, then share_N */
    double *share_N;
    bool infinite; /* a share */
    Flow flow;
} Placement;

#define BLOCK 8

/* Whether a block of shares has one above 0; most have none. No branch inside, so that it is vectorised. */
static inline bool
any_share(const double *share_E)
{
    int found = 0;
    for (int i = 0; i < BLOCK; i++) {
        found |= share_E[i] > 0;
    }
    return found;
}

/* Put an expert into a slot for each share above 0 (only count them if `put` is false). */
static int32_t
scan_shares(Placement *p, bool put)
{
    int32_t n = 0;
    for (Py_ssize_t s = 0; s < p->servers; s++) {
        const double *share_E = p->shares_SE + s * p->experts;
        p->first_S[s] = n;
        for (Py_ssize_t block = 0; block < p->experts; block += BLOCK) {
            Py_ssize_t end = block + BLOCK < p->experts ? block + BLOCK : p->experts;
            if (end - block == BLOCK && !any_share(share_E + block)) {
                continue;
            }
            for (Py_ssize_t e = block; e < end; e++) {
                if (share_E[e] > 0) {
                    p->infinite |= isinf(share_E[e]);
                    if (put) {
                        p->share_N[n] = share_E[e];
                        flow_put(&p->flow, n, (int32_t)e);
                    }
                    n++;
                }
            }
        }
    }
    p->first_S[p->servers] = n;
    return n;
}

/* Returns false if out of memory, or if a share is infinite. */
static bool
lay_out(Placement *p)
{
    int32_t servers = (int32_t)p->servers, experts = (int32_t)p->experts;
    p->first_S = malloc(((size_t)servers + 1) * sizeof(int32_t));
    if (p->first_S == NULL) {
        return false;
    }
    int32_t slots = scan_shares(p, false);
    p->block = malloc((size_t)slots * sizeof(double) + flow_bytes(servers, experts, slots));
    if (p->block == NULL || p->infinite) {
        return false;
    }
    p->share_N = p->block;
    flow_init(&p->flow, p->share_N + slots, servers, experts, p->first_S, p->speed_S);
    scan_shares(p, true);
    /* Normalise the shares of each expert to 1: a server may be gone. */
    for (int32_t e = 0; e < experts; e++) {
        double sum = 0;
        for (int32_t n = p->flow.head_E[e]; n != NONE; n = p->flow.next_N[n]) {
            sum += p->share_N[n];
        }
        for (int32_t n = p->flow.head_E[e]; n != NONE; n = p->flow.next_N[n]) {
            p->share_N[n] /= sum;
        }
    }
    return true;
}

/* Fullness of the fullest server under the best split of a batch. With a backlog, servers below it are levelled, too.
 */
static double
level_batch(Placement *p, const double *load_E)
{
    Flow *flow = &p->flow;
    for (int32_t s = 0; s < flow->servers; s++) {
        double load = p->backlog_S == NULL ? 0 : p->backlog_S[s];
        for (int32_t n = flow->first_S[s]; n < flow->first_S[s + 1]; n++) {
            flow->flow_N[n] = load_E[flow->expert_N[n]] * p->share_N[n];
            load += flow->flow_N[n];
        }
        flow->load_S[s] = load;
    }
    return flow_level(flow, EXACT, p->backlog_S != NULL);
}

/* Check that all values are finite and at least `least`, or above it if `above`. */
static bool
check_range(const double *values, Py_ssize_t count, const char *name, bool above)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!(above ? values[i] > 0 : values[i] >= 0) || isinf(values[i])) {
            PyErr_Format(PyExc_ValueError, "%s: item %zd is not a finite number %s 0", name, i,
                         above ? "above" : "of at least");
            return false;
        }
    }
    return true;
}

static bool
check_sizes(Py_ssize_t servers, Py_ssize_t experts)
{
    if (servers < 1 || experts < 1 || servers > INT32_MAX / 16 / experts) {
        PyErr_SetString(PyExc_ValueError, "servers and experts must be positive and their product below 2**27");
        return false;
    }
    return true;
}

enum { LOADS, SHARES, SPEEDS, BACKLOG, LEVELS, OUT, ARRAYS };

typedef struct {
    PyObject *load, *shares, *speeds, *backlog, *levels, *out; /* backlog and out: arrays or None */
    Py_ssize_t batches;
} Arguments;

static bool
open_all(Array *arrays, Placement *p, const Arguments *given)
{
    if (!check_sizes(p->servers, p->experts)) {
        return false;
    }
    if (given->batches < 0 || given->batches > PY_SSIZE_T_MAX / 8 / p->experts) {
        PyErr_SetString(PyExc_ValueError, "batches out of range");
        return false;
    }
    Py_ssize_t servers = p->servers, loads = given->batches * p->experts, shares = servers * p->experts;
    Py_ssize_t size = sizeof(double);
    if (!open_array(&arrays[LOADS], given->load, "load", loads, size, false) ||
        !open_array(&arrays[SHARES], given->shares, "shares", shares, size, false) ||
        !open_array(&arrays[SPEEDS], given->speeds, "speeds", servers, size, false) ||
        !open_array(&arrays[LEVELS], given->levels, "levels", given->batches, size, true) ||
        (given->backlog != Py_None &&
         !open_array(&arrays[BACKLOG], given->backlog, "backlog", servers, size, false)) ||
        (given->out != Py_None && !open_array(&arrays[OUT], given->out, "out", shares, size, true))) {
        return false;
    }
    p->shares_SE = arrays[SHARES].view.buf;
    p->speed_S = arrays[SPEEDS].view.buf;
    p->backlog_S = arrays[BACKLOG].open ? arrays[BACKLOG].view.buf : NULL;
    return check_range(arrays[LOADS].view.buf, loads, "load", false) &&
           check_range(p->speed_S, servers, "speeds", true) &&
           (p->backlog_S == NULL || check_range(p->backlog_S, servers, "backlog", false));
}

static void
write_shares(const Placement *p, const double *load_E, double *out_SE)
{
    const Flow *flow = &p->flow;
    memset(out_SE, 0, (size_t)p->servers * (size_t)p->experts * sizeof(double));
    for (int32_t n = 0; n < flow->slots; n++) {
        int32_t e = flow->expert_N[n];
        out_SE[(size_t)flow->server_N[n] * (size_t)p->experts + (size_t)e] =
            load_E[e] > 0 ? flow->flow_N[n] / load_E[e] : p->share_N[n];
    }
}

static PyObject *
minmax_levels(PyObject *self, PyObject *args)
{
    (void)self;
    Arguments given;
    Placement p = {0};
    if (!PyArg_ParseTuple(args, "OnOnnOOOO:levels", &given.load, &given.batches, &given.shares, &p.servers,
                          &p.experts, &given.speeds, &given.backlog, &given.levels, &given.out)) {
        return NULL;
    }
    Array arrays[ARRAYS] = {0};
    PyObject *answer = NULL;
    if (open_all(arrays, &p, &given)) {
        const double *load_BE = arrays[LOADS].view.buf;
        double *level_B = arrays[LEVELS].view.buf;
        bool fits;
        Py_BEGIN_ALLOW_THREADS;
        fits = lay_out(&p);
        for (Py_ssize_t b = 0; fits && b < given.batches; b++) {
            level_B[b] = level_batch(&p, load_BE + b * p.experts);
        }
        if (fits && given.batches > 0 && arrays[OUT].open) {
            write_shares(&p, load_BE + (given.batches - 1) * p.experts, arrays[OUT].view.buf);
        }
        Py_END_ALLOW_THREADS;
        if (fits) {
            answer = Py_NewRef(Py_None);
        } else if (p.infinite) {
            PyErr_SetString(PyExc_ValueError, "shares must be finite");
        } else {
            PyErr_NoMemory();
        }
    }
    free(p.block);
    free(p.first_S);
    close_arrays(arrays, ARRAYS);
    return answer;
}

/* ---- the module ------------------------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"levels", minmax_levels, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_minmax", .m_size = 0, .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__minmax(void)
{
    return PyModuleDef_Init(&module);
}
