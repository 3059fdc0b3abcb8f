/* The Python module of the planning loops. */
#include "bind.h"

/* Whether all numbers are in [low, high]. */
bool
within(const int64_t *values, Py_ssize_t count, int64_t low, int64_t high, const char *name)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        if (values[i] < low || values[i] > high) {
            PyErr_Format(PyExc_ValueError, "%s: %lld is out of range", name, (long long)values[i]);
            return false;
        }
    }
    return true;
}

/* Whether the counts of each layer are above 0 and sum to `replicas` at most. */
bool
counts_fit(const int64_t *count, Py_ssize_t layers, Py_ssize_t experts, Py_ssize_t replicas)
{
    for (Py_ssize_t l = 0; l < layers; l++) {
        uint64_t sum = 0;
        bool fits = true;
        /* A sum that has fitted so far cannot overflow, and sums after one that has not do not matter. */
        for (Py_ssize_t e = 0; e < experts; e++) {
            int64_t one = count[l * experts + e];
            fits &= one >= 1 && one <= replicas;
            sum += (uint64_t)one;
            fits &= sum <= (uint64_t)replicas;
        }
        if (!fits) {
            PyErr_SetString(PyExc_ValueError, "count: does not fit the replicas");
            return false;
        }
    }
    return true;
}

bool
servers_fit(const int32_t *server, Py_ssize_t size, Py_ssize_t servers)
{
    for (Py_ssize_t i = 0; i < size; i++) {
        if (server[i] < -1 || server[i] >= servers) {
            PyErr_SetString(PyExc_IndexError, "server: out of range");
            return false;
        }
    }
    return true;
}

/* Whether 32 bits can count what the servers hold. */
bool
list_fits(Py_ssize_t servers, Py_ssize_t experts)
{
    if (servers > 0 && experts > INT32_MAX / servers) {
        PyErr_SetString(PyExc_ValueError, "servers: too many");
        return false;
    }
    return true;
}

static PyMethodDef methods[] = {
    {"replicate", py_replicate, METH_VARARGS, "Replicas of each expert."},
    {"pack", py_pack, METH_VARARGS, "EPLB's packing."},
    {"separate", py_separate, METH_VARARGS, "Parts replicas of one expert by exchanges of equal loads."},
    {"place", py_place, METH_VARARGS, "Packing for any slots, replicas of one expert apart."},
    {"refine", py_refine, METH_VARARGS, "Exchanges that lower the peak."},
    {"scatter", py_scatter, METH_VARARGS, "A compact placement as holds and shares."},
    {"scatter_replicas", py_scatter_replicas, METH_VARARGS, "Replicas in any order as holds and shares."},
    {"server_load", py_server_load, METH_VARARGS, "Loads of servers."},
    {"spread", py_spread, METH_VARARGS, "Placement without statistics."},
    {"swap_hottest", py_swap_hottest, METH_VARARGS, "ScalpeLB's swaps."},
    {"held_load", py_held_load, METH_VARARGS, "Loads of servers with equal shares."},
    {"equal_shares", py_equal_shares, METH_VARARGS, "Equal shares for all that hold an expert."},
    {"compact_load", py_compact_load, METH_VARARGS, "Loads of servers under a compact placement."},
    {"count_new", py_count_new, METH_VARARGS, "Replicas held that were not."},
    {"match", py_match, METH_VARARGS, "Packs to the servers that hold most of them."},
    {"replay", py_replay, METH_VARARGS, "Sums of balancedness over batches."},
    {"allocate", py_allocate, METH_VARARGS, "Replicas of layers under a budget."},
    {"interleave", py_interleave, METH_VARARGS, "Experts of servers, by layer."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_planning",
    .m_doc = "The loops of the placement policies.",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC
PyInit__planning(void)
{
    return PyModule_Create(&definition);
}
