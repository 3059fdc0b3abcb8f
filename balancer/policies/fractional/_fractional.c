/* Plans all layers: checked arrays in, `layer.h` for each layer, arrays out. */
#include "../../../eaas/minmax/arrays.h"

#include <stdlib.h>
#include <string.h>

#include "layer.h"

#define MOST_SLOTS 100000000
/* A PAR this close to 1 gets few rounds. */
#define LITTLE 0.005
#define FEW_ROUNDS 4

typedef struct {
    Py_ssize_t scenarios, layers, servers, experts;
    const double *load_BLE, *speed_S;
    const int64_t *slots_LS;
    const uint8_t *current_LSE; /* NULL: nothing is held */
    const double *now_LSE;      /* shares of that; NULL: not known */
    const int32_t *node_S;      /* NULL: no limit */
    int32_t nodes;
    int64_t most_cross_node;
    double price;
    uint8_t *holds_LSE;
    double *shares_LSE;
} Task;

/* ---- one layer -------------------------------------------------------------------------------------------------- */

typedef struct {
    Layer layer;
    int32_t *first_S;
    void *block; /* load_BE, load_E, the scratch, the flows */
    size_t flow_bytes;
} Room;

static size_t
rounded(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

/* For the layer with the most slots. False: out of memory. */
static bool
make_room(Room *room, const Task *task, int32_t most_slots)
{
    size_t scenarios = (size_t)task->scenarios, experts = (size_t)task->experts;
    int32_t servers = (int32_t)task->servers;
    size_t doubles = scratch_doubles((int32_t)scenarios, servers, (int32_t)experts, most_slots);
    size_t counts = scratch_counts(servers, (int32_t)experts, most_slots);
    room->flow_bytes = rounded(flow_bytes(servers, (int32_t)experts, most_slots));
    size_t bytes = rounded(((scenarios + 1) * experts + doubles) * sizeof(double)) + rounded(counts * sizeof(int32_t)) +
                   scenarios * room->flow_bytes;
    room->first_S = malloc(((size_t)servers + 1) * sizeof(int32_t));
    room->layer.flow_B = malloc(scenarios * sizeof(Flow));
    room->block = malloc(bytes);
    if (room->first_S == NULL || room->layer.flow_B == NULL || room->block == NULL) {
        return false;
    }
    Layer *layer = &room->layer;
    layer->scenarios = (int32_t)scenarios;
    layer->servers = servers;
    layer->experts = (int32_t)experts;
    layer->first_S = room->first_S;
    layer->speed_S = task->speed_S;
    layer->node_S = task->node_S;
    layer->nodes = task->nodes;
    layer->most_cross_node = task->most_cross_node;
    layer->price = task->price;
    layer->load_BE = room->block;
    layer->load_E = layer->load_BE + scenarios * experts;
    layer->scratch = layer->load_E + experts;
    layer->counts = (int32_t *)(layer->scratch + doubles);
    return true;
}

static void
free_room(Room *room)
{
    free(room->block);
    free(room->layer.flow_B);
    free(room->first_S);
}

static void
begin_layer(Room *room, const Task *task, Py_ssize_t index)
{
    Layer *layer = &room->layer;
    size_t scenarios = (size_t)task->scenarios, experts = (size_t)task->experts;
    int32_t slots = 0;
    for (Py_ssize_t s = 0; s < task->servers; s++) {
        int64_t own = task->slots_LS[index * task->servers + s];
        room->first_S[s] = slots;
        /* A second replica of an expert on a server is useless. */
        slots += (int32_t)(own < task->experts ? own : task->experts);
    }
    room->first_S[task->servers] = slots;
    for (size_t e = 0; e < experts; e++) {
        layer->load_E[e] = 0;
        for (size_t b = 0; b < scenarios; b++) {
            double load = task->load_BLE[(b * (size_t)task->layers + (size_t)index) * experts + e];
            layer->load_BE[b * experts + e] = load;
            layer->load_E[e] += load / (double)scenarios;
        }
    }
    char *flows = (char *)room->block;
    size_t before = rounded((size_t)((char *)layer->counts - flows) +
                            scratch_counts(layer->servers, layer->experts, slots) * sizeof(int32_t));
    for (size_t b = 0; b < scenarios; b++) {
        flow_init(&layer->flow_B[b], flows + before + b * room->flow_bytes, layer->servers, layer->experts,
                  room->first_S, task->speed_S);
    }
}

/* Writes holds and shares; shares are means over the scenarios' flows. */
static void
write_layer(const Room *room, const Task *task, Py_ssize_t index)
{
    const Layer *layer = &room->layer;
    const Flow *first = &layer->flow_B[0];
    size_t experts = (size_t)layer->experts, begin = (size_t)index * (size_t)layer->servers * experts;
    double *share_N = layer->scratch;
    for (int32_t n = 0; n < first->slots; n++) {
        int32_t e = first->expert_N[n];
        double part = 0;
        for (int32_t b = 0; e != NONE && b < layer->scenarios; b++) {
            part += layer->flow_B[b].flow_N[n];
        }
        share_N[n] = e == NONE ? 0 : layer->load_E[e] > 0 ? part / (layer->load_E[e] * layer->scenarios) : 1;
    }
    for (int32_t e = 0; e < layer->experts; e++) {
        double sum = 0;
        for (int32_t n = first->head_E[e]; n != NONE; n = first->next_N[n]) {
            share_N[n] = share_N[n] > LEAST_SHARE ? share_N[n] : LEAST_SHARE;
            sum += share_N[n];
        }
        for (int32_t n = first->head_E[e]; n != NONE; n = first->next_N[n]) {
            size_t at = begin + (size_t)first->server_N[n] * experts + (size_t)e;
            task->holds_LSE[at] = 1;
            task->shares_LSE[at] = share_N[n] / sum;
        }
    }
}

static void
plan_layer(Room *room, const Task *task, Py_ssize_t index)
{
    Layer *layer = &room->layer;
    int32_t rounds = INT32_MAX;
    begin_layer(room, task, index);
    if (task->current_LSE != NULL) {
        Py_ssize_t at = index * task->servers * task->experts;
        keep(layer, task->current_LSE + at, task->now_LSE == NULL ? NULL : task->now_LSE + at);
        if (layer->scenarios == 1 && layer->node_S == NULL && refill(layer) < LITTLE) {
            rounds = FEW_ROUNDS;
        }
    } else {
        fill(layer);
    }
    limit_abroad(layer);
    improve(layer, rounds);
    for (int32_t b = 0; b < layer->scenarios; b++) {
        flow_level(&layer->flow_B[b], 1e-9, true);
    }
    write_layer(room, task, index);
}

/* ---- all layers --------------------------------------------------------------------------------------------------- */

/* The most slots of a layer, or -1 with an exception set. */
static int32_t
check_slots(const Task *task)
{
    int64_t most = 0;
    for (Py_ssize_t l = 0; l < task->layers; l++) {
        int64_t slots = 0;
        for (Py_ssize_t s = 0; s < task->servers; s++) {
            int64_t own = task->slots_LS[l * task->servers + s];
            if (own < 0) {
                PyErr_SetString(PyExc_ValueError, "slots: below 0");
                return -1;
            }
            slots += own < task->experts ? own : task->experts;
        }
        if (slots < task->experts || slots > MOST_SLOTS) {
            PyErr_Format(PyExc_ValueError, "slots: %lld in layer %zd for %zd experts", (long long)slots, l,
                         task->experts);
            return -1;
        }
        most = slots > most ? slots : most;
    }
    return (int32_t)most;
}

enum { LOAD, SLOTS, SPEEDS, CURRENT, NOW, NODES, HOLDS, SHARES, ARRAYS };

static bool
open_all(Task *task, Array *arrays, PyObject **given)
{
    if (task->scenarios < 1 || task->layers < 1 || task->servers < 1 || task->experts < 1 ||
        task->servers > INT32_MAX / 16 / task->experts || task->scenarios > 4096 ||
        task->layers > PY_SSIZE_T_MAX / 64 / task->scenarios / (task->servers * task->experts)) {
        PyErr_SetString(PyExc_ValueError, "scenarios, layers, servers or experts out of range");
        return false;
    }
    Py_ssize_t all = task->layers * task->servers * task->experts;
    if (!open_array(&arrays[LOAD], given[LOAD], "load", task->scenarios * task->layers * task->experts, 8, false) ||
        !open_array(&arrays[SLOTS], given[SLOTS], "slots", task->layers * task->servers, 8, false) ||
        !open_array(&arrays[SPEEDS], given[SPEEDS], "speeds", task->servers, 8, false) ||
        (given[CURRENT] != Py_None && !open_array(&arrays[CURRENT], given[CURRENT], "current", all, 1, false)) ||
        (given[NOW] != Py_None && !open_array(&arrays[NOW], given[NOW], "current shares", all, 8, false)) ||
        (given[NODES] != Py_None && !open_array(&arrays[NODES], given[NODES], "nodes", task->servers, 4, false)) ||
        !open_array(&arrays[HOLDS], given[HOLDS], "holds", all, 1, true) ||
        !open_array(&arrays[SHARES], given[SHARES], "shares", all, 8, true)) {
        return false;
    }
    task->load_BLE = arrays[LOAD].view.buf;
    task->slots_LS = arrays[SLOTS].view.buf;
    task->speed_S = arrays[SPEEDS].view.buf;
    task->current_LSE = arrays[CURRENT].open ? arrays[CURRENT].view.buf : NULL;
    task->now_LSE = arrays[NOW].open ? arrays[NOW].view.buf : NULL;
    task->node_S = arrays[NODES].open ? arrays[NODES].view.buf : NULL;
    task->holds_LSE = arrays[HOLDS].view.buf;
    task->shares_LSE = arrays[SHARES].view.buf;
    for (Py_ssize_t s = 0; task->node_S != NULL && s < task->servers; s++) {
        if (task->node_S[s] < 0) {
            PyErr_SetString(PyExc_ValueError, "nodes: below 0");
            return false;
        }
        task->nodes = task->node_S[s] >= task->nodes ? task->node_S[s] + 1 : task->nodes;
    }
    return true;
}

static PyObject *
fractional_plan(PyObject *self, PyObject *args)
{
    (void)self;
    Task task = {0};
    PyObject *given[ARRAYS];
    long long most_cross_node;
    if (!PyArg_ParseTuple(args, "OnnnnOOOOOLdOO:plan", &given[LOAD], &task.scenarios, &task.layers, &task.servers,
                          &task.experts, &given[SLOTS], &given[SPEEDS], &given[CURRENT], &given[NOW], &given[NODES], &most_cross_node,
                          &task.price, &given[HOLDS], &given[SHARES])) {
        return NULL;
    }
    task.most_cross_node = most_cross_node;
    Array arrays[ARRAYS] = {0};
    PyObject *answer = NULL;
    int32_t most_slots;
    if (open_all(&task, arrays, given) && (most_slots = check_slots(&task)) >= 0) {
        Room room = {0};
        bool fits;
        Py_BEGIN_ALLOW_THREADS;
        fits = make_room(&room, &task, most_slots);
        for (Py_ssize_t l = 0; fits && l < task.layers; l++) {
            plan_layer(&room, &task, l);
        }
        free_room(&room);
        Py_END_ALLOW_THREADS;
        answer = fits ? Py_NewRef(Py_None) : PyErr_NoMemory();
    }
    close_arrays(arrays, ARRAYS);
    return answer;
}

static PyMethodDef methods[] = {
    {"plan", fractional_plan, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_fractional", .m_size = 0, .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__fractional(void)
{
    return PyModuleDef_Init(&module);
}
