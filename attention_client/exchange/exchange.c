/* The common case of a layer call in one piece: choose servers, write requests, wait, sum the answers.
 *
 * In a layer call of a few tokens, the steps in Python take several times as long as the experts. So the case without
 * a fault is compiled. Anything else ends it: `Exchange.requests` hands what is in flight to `call.LayerCall`, which
 * knows about refusals, timeouts, hedges and failover.
 *
 *     Slots     the client's slots on one server: which are free, and the memory that holds them (slots.c)
 *     Route     the servers of one placement, with their shares: chooses and sends (`start`)
 *     Exchange  the requests of one layer call, until their answers are summed: `advance` looks for them at a given
 *               time, `collect` sums them; `finish` waits between such looks
 *
 * They change only under the GIL; waits and sums run without it. The time is an argument of all but `finish`, so that
 * a simulation drives this very code. A route has the memory of its calls from the first one on (calls.h): after that, a
 * call takes none but Python's for an Exchange and torch's for the sum. Each wait has a deadline.
 */
#include "calls.h"

#include "../dispatch/sum.h"
#include "tensors.h"

#include <assert.h>
#include <stdlib.h>

/* Times that a route keeps until `Route.take` reads them; later ones are dropped. */
#define MOST_SAMPLES 64
/* The compiled requests' ids, which Python's never reach. */
#define OWN_IDS (UINT64_C(1) << 63)
#define SPIN_NS UINT64_C(20000)
/* Monotonic seconds of any deadline: they fit into nanoseconds. */
#define MOST_S 1e9
#define MOST_PAIRS (INT32_MAX / 64)

typedef struct {
    int32_t server, rows;
    double work, pairs, took_s, service_s, queue_s;
} Sample;

typedef struct {
    PyObject_HEAD
    PyObject *view;  /* the caller's: what the servers are */
    PyObject *slots_S; /* tuple of Slots or None */
    Array replicas[3]; /* first_X of each layer, server_N, share_N: see route.h */
    Py_ssize_t layers, servers, experts;
    double load_pairs;
    double least_s; /* least time of a request */
    bool levels;
    uint32_t *calls_L; /* so far */
    double *rate_S, *backlog_S;
    double *queue_S; /* usual seconds until a server begins a request */
    uint64_t *answered_S; /* since the last `take` */
    uint64_t exchanges, pairs, nonfinite; /* since the last `take` */
    Calls calls;
    double took_s[MOST_SAMPLES]; /* of the first exchanges since the last `take` */
    Sample samples[MOST_SAMPLES];
    int sample_count;
} Route;

typedef struct {
    PyObject_HEAD
    Route *route; /* a reference */
    Call *call;   /* NULL: over, finished or handed over */
    uint32_t top_k;
} Exchange;

static PyTypeObject *slots_type, *route_type, *exchange_type;
static uint64_t next_id = OWN_IDS;

static double
seconds(void)
{
    return (double)now_ns() * 1e-9;
}

/* ---- Route ------------------------------------------------------------------------------------------------ */

static void
route_dealloc(Route *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->view);
    Py_XDECREF(self->slots_S);
    close_arrays(self->replicas, COUNT_OF(self->replicas));
    free(self->calls.memory);
    free(self->rate_S); /* and the other arrays of the servers and layers */
    PyObject_Free(self);
    Py_DECREF(type);
}

/* Open the replicas' arrays, and check what they point to. */
static bool
open_replicas(Route *self, PyObject *firsts, PyObject *held_by, PyObject *shares, Py_ssize_t layers,
              Py_ssize_t experts, Py_ssize_t servers)
{
    Array *arrays = self->replicas;
    if (!open_array(&arrays[0], firsts, "firsts", layers * (experts + 1), 4, false) ||
        !open_items(&arrays[1], held_by, "held_by", 4, false) || !open_items(&arrays[2], shares, "shares", 4, false)) {
        return false;
    }
    bool right = arrays[1].view.len == arrays[2].view.len;
    for (Py_ssize_t l = 0; right && l < layers; l++) {
        const int32_t *first_X = (const int32_t *)arrays[0].view.buf + l * (experts + 1);
        right = are_replicas(first_X, experts, arrays[1].view.buf, arrays[1].view.len / 4, servers);
    }
    if (!right) {
        PyErr_SetString(PyExc_ValueError, "replicas out of range");
    }
    return right;
}

static PyObject *
route_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"view", "slots", "firsts", "held_by", "shares", "layers", "experts", "levels", "least_s", NULL};
    PyObject *view, *slots_S, *firsts, *held_by, *shares;
    Py_ssize_t layers, experts;
    double least_s;
    int levels;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOnnpd:Route", names, &view, &slots_S, &firsts, &held_by,
                                     &shares, &layers, &experts, &levels, &least_s)) {
        return NULL;
    }
    Route *self = (Route *)PyType_GenericAlloc(type, 0);
    if (self == NULL || (self->slots_S = PySequence_Tuple(slots_S)) == NULL) {
        Py_XDECREF((PyObject *)self);
        return NULL;
    }
    self->view = Py_NewRef(view);
    Py_ssize_t servers = PyTuple_Size(self->slots_S);
    bool right = servers >= 1 && servers <= MOST_SERVERS && layers >= 1 && experts >= 1 && experts <= INT32_MAX &&
                 layers <= PY_SSIZE_T_MAX / 64 / (experts + 1);
    for (Py_ssize_t s = 0; right && s < servers; s++) {
        PyObject *slots = PyTuple_GetItem(self->slots_S, s);
        right = slots == Py_None || PyObject_TypeCheck(slots, slots_type);
    }
    if (!right) {
        PyErr_SetString(PyExc_ValueError, "slots, layers or experts out of range");
    }
    else if (open_replicas(self, firsts, held_by, shares, layers, experts, servers)) {
        self->layers = layers;
        self->servers = servers;
        self->experts = experts;
        self->load_pairs = 1.0;
        self->levels = levels != 0;
        self->least_s = least_s;
        size_t server_bytes = 3 * sizeof(double) + sizeof(uint64_t);
        self->rate_S = calloc(1, (size_t)servers * server_bytes + (size_t)layers * sizeof(uint32_t));
        if (self->rate_S != NULL) {
            self->backlog_S = self->rate_S + servers;
            self->queue_S = self->backlog_S + servers;
            self->answered_S = (uint64_t *)(self->queue_S + servers);
            self->calls_L = (uint32_t *)(self->answered_S + servers);
            for (Py_ssize_t s = 0; s < servers; s++) {
                self->rate_S[s] = 1.0;
            }
            return (PyObject *)self;
        }
        PyErr_NoMemory();
    }
    Py_DECREF(self);
    return NULL;
}

static PyObject *
route_set_load(Route *self, PyObject *args)
{
    Array arrays[2] = {0};
    PyObject *rates, *queues;
    double load_pairs;
    if (!PyArg_ParseTuple(args, "OOd:set_load", &rates, &queues, &load_pairs)) {
        return NULL;
    }
    if (!(load_pairs > 0 && load_pairs <= INT32_MAX)) {
        PyErr_SetString(PyExc_ValueError, "load_pairs out of range");
        return NULL;
    }
    bool right = open_array(&arrays[0], rates, "rates", self->servers, 8, false) &&
                 open_array(&arrays[1], queues, "queues", self->servers, 8, false);
    if (right) {
        self->load_pairs = load_pairs;
        memcpy(self->rate_S, arrays[0].view.buf, (size_t)self->servers * sizeof(double));
        memcpy(self->queue_S, arrays[1].view.buf, (size_t)self->servers * sizeof(double));
    }
    close_arrays(arrays, COUNT_OF(arrays));
    return right ? Py_NewRef(Py_None) : NULL;
}

/* Append a new item, or set an exception. */
static bool
append_item(PyObject *list, PyObject *item)
{
    bool right = item != NULL && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return right;
}

static PyObject *
route_take(Route *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *answered = PyList_New(0), *samples = PyList_New(0), *took = PyList_New(0), *taken = NULL;
    bool right = answered != NULL && samples != NULL && took != NULL;
    for (Py_ssize_t s = 0; right && s < self->servers; s++) {
        right = append_item(answered, PyLong_FromUnsignedLongLong(self->answered_S[s]));
    }
    for (uint64_t i = 0; right && i < self->exchanges && i < MOST_SAMPLES; i++) {
        right = append_item(took, PyFloat_FromDouble(self->took_s[i]));
    }
    for (int i = 0; right && i < self->sample_count; i++) {
        const Sample *sample = &self->samples[i];
        right = append_item(samples, Py_BuildValue("iiddddd", (int)sample->server, (int)sample->rows, sample->work,
                                                   sample->pairs, sample->took_s, sample->service_s, sample->queue_s));
    }
    if (right) {
        taken = Py_BuildValue("KKKOOO", (unsigned long long)self->exchanges, (unsigned long long)self->pairs,
                              (unsigned long long)self->nonfinite, answered, samples, took);
    }
    if (taken != NULL) {
        memset(self->answered_S, 0, (size_t)self->servers * sizeof *self->answered_S);
        self->exchanges = self->pairs = self->nonfinite = 0;
        self->sample_count = 0;
    }
    Py_XDECREF(answered);
    Py_XDECREF(samples);
    Py_XDECREF(took);
    return taken;
}

static PyObject *
route_running(Route *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(self->calls.memory == NULL ? 0 : MOST_CALLS - self->calls.free_count);
}

static PyObject *
route_waiting(Route *self, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(self->exchanges);
}

/* ---- start: choose, and write the requests ---------------------------------------------------------------- */

typedef struct {
    Inputs inputs;
    Py_ssize_t layer, tokens, top_k, hidden;
    Tensor ids;
    const uint8_t *wanted_T; /* NULL: all */
} Arguments;

/* Make the memory of the calls. False: an exception is set, or no slot has room for a token of so many experts. */
static bool
make_calls(Route *route, uint32_t top_k)
{
    uint64_t slot_most = 0;
    Py_ssize_t hidden = 0, replicas = route->replicas[1].view.len / (Py_ssize_t)sizeof(int32_t);
    for (Py_ssize_t s = 0; s < route->servers; s++) {
        PyObject *slots = PyTuple_GetItem(route->slots_S, s);
        if (slots != Py_None) {
            const Grant *grant = &((Slots *)slots)->grant;
            /* The narrowest dtype has the most tokens. */
            uint64_t tokens = slot_tokens(grant, top_k, WIRE_BFLOAT16);
            slot_most = tokens > slot_most ? tokens : slot_most;
            hidden = grant->hidden > hidden ? grant->hidden : hidden;
        }
    }
    uint64_t rows = wire_product(slot_most, (uint64_t)(route->servers < MOST_PARTS ? route->servers : MOST_PARTS));
    uint64_t most_rows = MOST_PAIRS / top_k;
    Calls *calls = &route->calls;
    calls->most_rows = (int64_t)(rows < most_rows ? rows : most_rows);
    calls->most_pairs = calls->most_rows * top_k;
    if (calls->most_rows == 0) {
        return false;
    }
    size_t workspace = route_workspace(calls->most_pairs, route->servers, route->experts, replicas);
    calls->memory = malloc(lay_out_calls(calls, NULL, hidden, route->servers, workspace));
    if (calls->memory == NULL) {
        PyErr_NoMemory();
        return false;
    }
    lay_out_calls(calls, calls->memory, hidden, route->servers, workspace);
    calls->free_count = MOST_CALLS;
    return true;
}

/* Set when to hedge and to give up a request. False if the server's times are unknown: Python learns them. */
static bool
set_deadlines(Request *request, double least_s, double left_s, double now)
{
    const Slots *slots = request->slots;
    double usual_s = slots->expected_s[size_class(request->part.rows)];
    double patience_s = budget_s(usual_s, least_s, left_s);
    if (!(usual_s > 0) || !(patience_s > 0) || !(now + patience_s < MOST_S)) {
        return false;
    }
    request->sent_at = now;
    request->expires_at = now + patience_s;
    request->hedge_at = slots->tail > 0 ? now + hedge_s(usual_s, slots->tail) : request->expires_at;
    request->part.budget_us = (uint64_t)(patience_s * 1e6);
    return true;
}

/* Write all requests and hand them to their servers; runs without the GIL. A slot that the server took back stays as it
 * is: `advance` finds it. */
static void
send_requests(Call *call)
{
    for (int i = 0; i < call->count; i++) {
        Request *request = &call->requests[i];
        const Slots *slots = request->slots;
        request->sent = write_request(&slots->grant, request->slot, &call->inputs, &request->part) &&
                        hand_over(&slots->grant, request->slot);
        if (request->sent && slots->direct) {
            ring_doorbell(slots->doorbell);
        }
    }
}

static void
forget_request(Request *request, bool give)
{
    Slots *slots = request->slots;
    slots->work -= request->work;
    slots->users--;
    if (give) {
        slots_push(slots, request->slot);
        if (MUTANT(8)) {
            slots_push(slots, request->slot);
        }
    }
    slots_drop(slots);
    Py_DECREF(slots);
    request->slots = NULL;
}

/* Make a request to each chosen server: slot, id, deadlines. False: not possible now, as where a slot is too small;
 * nothing is held. */
static bool
take_slots(Call *call, Route *route, double left_s, double now)
{
    const Calls *calls = &route->calls;
    int64_t first = 0, top_k = call->inputs.top_k;
    bool right = true;
    for (Py_ssize_t s = 0; right && s < route->servers; s++) {
        int64_t rows = calls->count_S[s];
        if (rows == 0) {
            continue;
        }
        Slots *slots = (Slots *)PyTuple_GetItem(route->slots_S, s);
        bool usable = (PyObject *)slots != Py_None && !slots->stopped && slots->grant.hidden == call->hidden &&
                      (uint64_t)rows <= slot_tokens(&slots->grant, call->inputs.top_k, call->inputs.dtype);
        int32_t slot = usable && call->count < MOST_PARTS ? slots_pop(slots) : -1;
        if (slot < 0) {
            right = false;
            continue;
        }
        Request *request = &call->requests[call->count++];
        *request = (Request){
            .slots = (Slots *)Py_NewRef((PyObject *)slots),
            .server = (int32_t)s,
            .slot = slot,
            .part = {
                .rows_R = call->rows_R + first,
                .ids_RK = call->ids_RK + first * top_k,
                .rows = (uint32_t)rows,
                .request_id = next_id++,
            },
            .work = calls->work_S[s],
            .pairs = calls->pairs_S[s],
        };
        slots->users++;
        slots->work += request->work;
        right = set_deadlines(request, route->least_s, left_s, now);
        first += rows;
    }
    for (; !right && call->count > 0; call->count--) {
        forget_request(&call->requests[call->count - 1], true);
    }
    return right;
}

/* Copy ids to int64 and mark the wanted pairs; returns their number, or -1 for an expert out of range. */
static int64_t
copy_ids(const Arguments *arguments, Py_ssize_t experts, int64_t *ids_P, uint8_t *wanted_P)
{
    const void *ids = arguments->ids.data;
    bool wide = arguments->ids.values == INT64_VALUES;
    int64_t wanted = 0;
    for (Py_ssize_t t = 0, p = 0; t < arguments->tokens; t++) {
        bool asked = arguments->wanted_T == NULL || arguments->wanted_T[t] != 0;
        for (Py_ssize_t k = 0; k < arguments->top_k; k++, p++) {
            ids_P[p] = wide ? ((const int64_t *)ids)[p] : ((const int32_t *)ids)[p];
            wanted_P[p] = asked;
            if (asked && (ids_P[p] < 0 || ids_P[p] >= experts)) {
                return -1;
            }
            wanted += asked;
        }
    }
    return wanted;
}

/* Give the block of a call back, whose requests are forgotten. */
static void
end_exchange(Exchange *exchange)
{
    Call *call = exchange->call;
    PyObject *x = call->x;
    exchange->call = NULL;
    give_call(&exchange->route->calls, call);
    Py_DECREF(x);
}

/* Forget the requests: slots in flight are lost, not reused, or another has them. */
static void
forget_all(Call *call)
{
    for (; call->count > 0; call->count--) {
        forget_request(&call->requests[call->count - 1], false);
    }
}

static void
exchange_dealloc(Exchange *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->call != NULL) {
        /* Normally none is left: `finish` and `requests` end them. */
        forget_all(self->call);
        end_exchange(self);
    }
    Py_XDECREF((PyObject *)self->route);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* Read the tensors of a call. False: compiled code cannot. */
static bool
read_inputs(PyObject *const *args, Arguments *call)
{
    Tensor x, scores, wanted = {0}, *ids = &call->ids;
    bool some = args[4] != Py_None;
    if (!read_tensor(args[1], 2, &x) || !read_tensor(args[2], 2, ids) || !read_tensor(args[3], 2, &scores) ||
        (some && !read_tensor(args[4], 1, &wanted))) {
        return false;
    }
    Py_ssize_t tokens = x.size[0], top_k = ids->size[1];
    if ((x.values != FLOAT32_VALUES && x.values != BFLOAT16_VALUES) || scores.values != FLOAT32_VALUES ||
        (ids->values != INT32_VALUES && ids->values != INT64_VALUES) || (some && wanted.values != BOOL_VALUES) ||
        !is_contiguous(&x) || !is_contiguous(ids) || !is_contiguous(&scores) || (some && !is_contiguous(&wanted))) {
        return false;
    }
    if (ids->size[0] != tokens || scores.size[0] != tokens || scores.size[1] != top_k ||
        (some && wanted.size[0] != tokens) || tokens < 1 || x.size[1] < 1 || top_k < 1 ||
        tokens > MOST_PAIRS / top_k) {
        return false;
    }
    call->inputs.x = x.data;
    call->inputs.dtype = x.values == FLOAT32_VALUES ? WIRE_FLOAT32 : WIRE_BFLOAT16;
    call->inputs.scores = (const float *)scores.data;
    call->inputs.top_k = (uint32_t)top_k;
    call->tokens = tokens;
    call->hidden = x.size[1];
    call->top_k = top_k;
    call->wanted_T = (const uint8_t *)wanted.data;
    return true;
}

/* Note each server's backlog: what the client itself has in flight there, or its usual queue. False: one owes the
 * answer to an abandoned request. */
static bool
read_backlogs(Route *route)
{
    for (Py_ssize_t s = 0; s < route->servers; s++) {
        PyObject *slots = PyTuple_GetItem(route->slots_S, s);
        if (slots != Py_None && ((Slots *)slots)->abandoned > 0) {
            return false;
        }
        double own_s = slots == Py_None ? 0.0 : route->rate_S[s] * ((Slots *)slots)->work;
        route->backlog_S[s] = own_s > route->queue_S[s] ? own_s : route->queue_S[s];
    }
    return true;
}

/* Choose the servers of a call, and take their slots. False: not possible now; nothing is held. */
static bool
choose(Route *self, const Arguments *arguments, Call *call, double left_s, double now)
{
    const Calls *calls = &self->calls;
    call->inputs = arguments->inputs;
    call->tokens = arguments->tokens;
    call->hidden = arguments->hidden;
    call->started_at = now;
    int64_t pairs = copy_ids(arguments, self->experts, calls->ids_P, calls->wanted_P);
    Routing routing = {
        .tokens = arguments->tokens,
        .top_k = arguments->top_k,
        .servers = self->servers,
        .experts = self->experts,
        .load_pairs = self->load_pairs,
        .draw = draw_of(self->calls_L[arguments->layer]++, (uint64_t)arguments->layer),
        .ids_P = calls->ids_P,
        .wanted_P = calls->wanted_P,
        .first_X = (const int32_t *)self->replicas[0].view.buf + arguments->layer * (self->experts + 1),
        .server_N = self->replicas[1].view.buf,
        .share_N = self->replicas[2].view.buf,
        .rate_S = self->levels ? self->rate_S : NULL,
        .backlog_S = self->levels ? self->backlog_S : NULL,
    };
    int64_t most_rows = calls->most_pairs / arguments->top_k;
    Routed routed = {
        .count_S = calls->count_S,
        .work_S = calls->work_S,
        .pairs_S = calls->pairs_S,
        .rows_out = call->rows_R,
        .ids_out = call->ids_RK,
        .most_rows = most_rows < calls->most_rows ? most_rows : calls->most_rows,
    };
    call->pairs = (uint64_t)pairs;
    return pairs >= 0 && route(&routing, &routed, calls->workspace) == 0 && take_slots(call, self, left_s, now);
}

static PyObject *
route_start(Route *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 8) {
        PyErr_SetString(PyExc_TypeError, "start(layer, x, ids, scores, wanted, epoch, left_s, now)");
        return NULL;
    }
    Arguments arguments = {.layer = PyLong_AsSsize_t(args[0]), .inputs.epoch = PyLong_AsUnsignedLongLong(args[5])};
    double left_s = PyFloat_AsDouble(args[6]), now = PyFloat_AsDouble(args[7]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (arguments.layer < 0 || arguments.layer >= self->layers || !read_inputs(args, &arguments) ||
        !read_backlogs(self)) {
        Py_RETURN_NONE;
    }
    arguments.inputs.layer = (uint32_t)arguments.layer;
    if (self->calls.memory == NULL && !make_calls(self, arguments.inputs.top_k)) {
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    }
    Call *call = take_call(&self->calls, arguments.tokens, arguments.top_k);
    if (call == NULL) {
        Py_RETURN_NONE;
    }
    Exchange *exchange = (Exchange *)PyType_GenericAlloc(exchange_type, 0);
    if (exchange == NULL) {
        give_call(&self->calls, call);
        return NULL;
    }
    call->x = Py_NewRef(args[1]);
    exchange->route = (Route *)Py_NewRef((PyObject *)self);
    exchange->call = call;
    exchange->top_k = arguments.inputs.top_k;
    if (!choose(self, &arguments, call, left_s, now)) {
        Py_DECREF(exchange);
        Py_RETURN_NONE;
    }
    size_t bytes = (size_t)call->tokens * (size_t)call->hidden * value_bytes(call->inputs.dtype);
    if (bytes <= BRIEF_BYTES) {
        send_requests(call);
        return (PyObject *)exchange;
    }
    for (int i = 0; i < call->count; i++) {
        call->requests[i].slots->writers++;
    }
    Py_BEGIN_ALLOW_THREADS
    send_requests(call);
    Py_END_ALLOW_THREADS
    for (int i = 0; i < call->count; i++) {
        call->requests[i].slots->writers--;
    }
    return (PyObject *)exchange;
}

static PyMethodDef route_methods[] = {
    {"start", (PyCFunction)(void (*)(void))route_start, METH_FASTCALL, "see _exchange.pyi"},
    {"set_load", (PyCFunction)route_set_load, METH_VARARGS, "see _exchange.pyi"},
    {"take", (PyCFunction)route_take, METH_NOARGS, "see _exchange.pyi"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef route_getset[] = {
    {"running", (getter)route_running, NULL, "exchanges that are not over", NULL},
    {"waiting", (getter)route_waiting, NULL, "exchanges since the last take", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot route_slots[] = {
    {Py_tp_new, route_new},       {Py_tp_dealloc, route_dealloc}, {Py_tp_methods, route_methods},
    {Py_tp_getset, route_getset}, {Py_tp_doc, "see _exchange.pyi"}, {0, NULL},
};

static PyType_Spec route_spec = {
    .name = "attention_client.exchange._exchange.Route",
    .basicsize = sizeof(Route),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = route_slots,
};

/* ---- finish: wait, check, sum ----------------------------------------------------------------------------- */

typedef enum { PENDING, ALL_CAME, TROUBLE, SIGNAL } Progress;

static bool
any_stopped(const Call *call)
{
    for (int i = 0; i < call->count; i++) {
        if (!MUTANT(10) && __atomic_load_n(&call->requests[i].slots->stopped, __ATOMIC_RELAXED)) {
            return true;
        }
    }
    return false;
}

/* When to hedge or give up the first of the requests without an answer. */
static double
due_at(const Call *call)
{
    double due = MOST_S;
    for (int i = call->answered; i < call->count - MUTANT(9); i++) {
        const Request *request = &call->requests[i];
        due = request->hedge_at < due ? request->hedge_at : due;
        due = request->expires_at < due ? request->expires_at : due;
    }
    return due;
}

/* Look for the answers, in the order of the requests. TROUBLE: one is late, lost or not a result. Runs without the GIL. */
static Progress
advance(Call *call, double now)
{
    assert(call->answered <= call->count && call->count <= MOST_PARTS);
    for (; call->answered < call->count; call->answered++) {
        Request *request = &call->requests[call->answered];
        ResultHeader header;
        Fault fault;
        AnswerState state = answer_of(&request->slots->grant, request->slot, request->part.request_id,
                                      request->part.rows, &header, &fault);
        if (state == ANSWER_AWAITED) {
            request->exact = true;
            return any_stopped(call) || now >= due_at(call) ? TROUBLE : PENDING;
        }
        if (state != ANSWER_CAME || header.status != STATUS_OK) {
            return TROUBLE;
        }
        request->exact = request->exact || call->answered == 0;
        request->arrived_at = now;
        request->service_s = (double)header.service_us * 1e-6;
        request->queue_s = (double)header.queue_us * 1e-6;
    }
    return ALL_CAME;
}

/* Wait until `advance` has something to say, at the latest when a request is due; runs without the GIL. */
static Progress
wait_for_answers(Call *call)
{
    int waited_on = -1;
    uint64_t started = 0, spin_ns = 0;
    while (call->answered < call->count) {
        const Request *request = &call->requests[call->answered];
        Slots *slots = request->slots;
        /* Read before the flag: a later ring changes it. */
        int64_t seen_seq = __atomic_load_n(&slots->reply_doorbell->seq, __ATOMIC_ACQUIRE);
        uint64_t now = now_ns();
        int looked_at = call->answered;
        Progress progress = advance(call, (double)now * 1e-9);
        if (progress != PENDING) {
            return progress;
        }
        if (call->answered != looked_at) {
            continue;
        }
        double due = due_at(call);
        assert((double)now * 1e-9 < due);
        if (waited_on != looked_at) {
            waited_on = looked_at;
            started = now;
            spin_ns = spin_for(&slots->spins, SPIN_NS);
        }
        const Wait wait = {
            .flags = &slots->grant.flags[request->slot],
            .count = 1,
            .mask = 1u << SLOT_DONE | 1u << SLOT_OFFLINE,
            .doorbell = slots->reply_doorbell,
            .seen_seq = seen_seq,
            .spin_until_ns = started + spin_ns,
            .deadline_ns = (uint64_t)(due * 1e9),
        };
        Outcome outcome = wait_slice(&wait);
        if (outcome == WAIT_READY) {
            learn_spin(&slots->spins, now_ns() - started, spin_ns, SPIN_NS);
        }
        if (outcome == WAIT_INTERRUPTED) {
            return SIGNAL;
        }
    }
    return ALL_CAME;
}

static uint32_t
bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* To the nearest, with ties to even, as torch does. */
static uint16_t
to_bfloat16(float value)
{
    uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) {
        return 0x7fc0;
    }
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static bool
is_finite_row(const float *row, Py_ssize_t hidden)
{
    uint32_t wrong = 0;
    for (Py_ssize_t h = 0; h < hidden; h++) {
        wrong |= (bits_of(row[h]) & 0x7f800000u) == 0x7f800000u;
    }
    return wrong == 0;
}

/* Sum the answers in the order of the requests (by server and first token), and count the rows with a NaN or infinite
 * value. Runs without the GIL. */
static void
sum_answers(Call *call, char *out)
{
    Py_ssize_t hidden = call->hidden;
    int dtype = call->inputs.dtype;
    size_t row_bytes = (size_t)hidden * value_bytes(dtype);
    Addend addends[MOST_PARTS];
    for (int i = 0; i < call->count; i++) {
        const Request *request = &call->requests[i];
        addends[i] = (Addend){request->part.rows_R, result_of(&request->slots->grant, request->slot),
                              (ptrdiff_t)request->part.rows, 0};
    }
    call->nonfinite = 0;
    for (Py_ssize_t t = 0; t < call->tokens; t++) {
        float *sum = dtype == WIRE_FLOAT32 ? (float *)(out + (size_t)t * row_bytes) : call->row_H;
        if (!sum_token(sum, t, hidden, addends, call->count)) {
            memset(out + (size_t)t * row_bytes, 0, row_bytes);
            continue;
        }
        call->nonfinite += !is_finite_row(sum, hidden);
        for (Py_ssize_t h = 0; dtype == WIRE_BFLOAT16 && h < hidden; h++) {
            ((uint16_t *)(out + (size_t)t * row_bytes))[h] = to_bfloat16(sum[h]);
        }
    }
}

static void
add_sample(Route *route, const Request *request)
{
    route->answered_S[request->server]++;
    if (request->exact && route->sample_count < MOST_SAMPLES) {
        route->samples[route->sample_count++] =
            (Sample){request->server, (int32_t)request->part.rows, request->work, request->pairs,
                     request->arrived_at - request->sent_at, request->service_s, request->queue_s};
    }
}

/* Free the slots. False if one was granted to another client meanwhile: then the sum is worthless. */
static bool
free_slots(Call *call)
{
    bool own = true;
    for (int i = 0; i < call->count; i++) {
        Request *request = &call->requests[i];
        bool mine = free_slot(&request->slots->grant, request->slot);
        forget_request(request, mine);
        own = own && mine;
    }
    call->count = 0;
    return own;
}

/* The call that a method works on, or an exception. It is `busy` where other code may run meanwhile. */
static Call *
open_call(const Exchange *self)
{
    if (self->call == NULL || self->call->busy) {
        PyErr_SetString(PyExc_ValueError, self->call == NULL ? "the exchange is over" : "another thread is using the exchange");
        return NULL;
    }
    return self->call;
}

/* Sum the answers, which have all come. NULL: an exception; the call stays. */
static PyObject *
sum_call(Call *call)
{
    PyObject *out = empty_like(call->x);
    Tensor made;
    if (out == NULL || !read_tensor(out, 2, &made)) {
        Py_XDECREF(out);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    Py_BEGIN_ALLOW_THREADS
    sum_answers(call, made.data);
    Py_END_ALLOW_THREADS
    return out;
}

/* End the exchange, and note when the sum was made. None instead of a worthless one, so that `LayerCall` goes on. */
static PyObject *
end_with(Exchange *self, PyObject *out, double now)
{
    Route *route = self->route;
    Call *call = self->call;
    for (int i = 0; i < call->count; i++) {
        add_sample(route, &call->requests[i]);
    }
    double took_s = now - call->started_at;
    uint64_t pairs = call->pairs, nonfinite = call->nonfinite;
    bool own = free_slots(call);
    end_exchange(self);
    if (!own) {
        Py_DECREF(out);
        Py_RETURN_NONE;
    }
    if (route->exchanges < MOST_SAMPLES) {
        route->took_s[route->exchanges] = took_s;
    }
    route->exchanges++;
    route->pairs += pairs;
    route->nonfinite += nonfinite;
    return out;
}

static PyObject *
exchange_finish(Exchange *self, PyObject *Py_UNUSED(ignored))
{
    Call *call = open_call(self);
    if (call == NULL) {
        return NULL;
    }
    call->busy = true;
    Progress progress;
    /* A signal comes before the call is due. */
    do {
        Py_BEGIN_ALLOW_THREADS
        progress = wait_for_answers(call);
        Py_END_ALLOW_THREADS
    } while (progress == SIGNAL && PyErr_CheckSignals() == 0);
    PyObject *out = progress == ALL_CAME ? sum_call(call) : NULL;
    call->busy = false;
    if (out != NULL) {
        return end_with(self, out, seconds());
    }
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *
exchange_advance(Exchange *self, PyObject *time)
{
    double now = PyFloat_AsDouble(time);
    Call *call = now == -1.0 && PyErr_Occurred() ? NULL : open_call(self);
    if (call == NULL) {
        return NULL;
    }
    Progress progress = advance(call, now);
    return progress == PENDING ? Py_NewRef(Py_None) : PyBool_FromLong(progress == ALL_CAME);
}

static PyObject *
exchange_collect(Exchange *self, PyObject *time)
{
    double now = PyFloat_AsDouble(time);
    Call *call = now == -1.0 && PyErr_Occurred() ? NULL : open_call(self);
    if (call == NULL) {
        return NULL;
    }
    if (call->answered < call->count) {
        PyErr_SetString(PyExc_ValueError, "an answer has not come");
        return NULL;
    }
    call->busy = true;
    PyObject *out = sum_call(call);
    call->busy = false;
    return out == NULL ? NULL : end_with(self, out, now);
}

/* Hand the requests over: [(server, slot, request_id, rows, ids, work, sent_at, hedge_at, expires_at)]. */
static PyObject *
exchange_requests(Exchange *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *list = PyList_New(0);
    if (list == NULL || self->call == NULL) {
        return list;
    }
    Call *call = open_call(self);
    if (call == NULL) {
        Py_DECREF(list);
        return NULL;
    }
    Py_ssize_t top_k = (Py_ssize_t)call->inputs.top_k;
    for (int i = 0; list != NULL && i < call->count; i++) {
        const Request *request = &call->requests[i];
        Py_ssize_t rows = (Py_ssize_t)request->part.rows;
        PyObject *item = Py_BuildValue("iiKy#y#dddd", (int)request->server, (int)request->slot,
                                       (unsigned long long)request->part.request_id, (char *)request->part.rows_R,
                                       rows * 8, (char *)request->part.ids_RK, rows * top_k * 4, request->work,
                                       request->sent_at, request->hedge_at, request->expires_at);
        if (!append_item(list, item)) {
            Py_CLEAR(list);
        }
    }
    if (list != NULL) {
        /* The memory of the slots stays until the new owner calls `Slots.leave`. */
        for (int i = 0; i < call->count; i++) {
            call->requests[i].slots->users++;
        }
        forget_all(call);
        end_exchange(self);
    }
    return list;
}

static PyMethodDef exchange_methods[] = {
    {"finish", (PyCFunction)exchange_finish, METH_NOARGS, "see _exchange.pyi"},
    {"advance", (PyCFunction)exchange_advance, METH_O, "see _exchange.pyi"},
    {"collect", (PyCFunction)exchange_collect, METH_O, "see _exchange.pyi"},
    {"requests", (PyCFunction)exchange_requests, METH_NOARGS, "see _exchange.pyi"},
    {NULL, NULL, 0, NULL},
};

static PyObject *
exchange_view(Exchange *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->route->view);
}

static PyObject *
exchange_top_k(Exchange *self, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLong(self->top_k);
}

static PyObject *
exchange_sent(Exchange *self, void *Py_UNUSED(closure))
{
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && self->call != NULL && i < self->call->count; i++) {
        const Request *request = &self->call->requests[i];
        if (request->sent &&
            !append_item(list, Py_BuildValue("ii", (int)request->server, (int)request->slot))) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *
exchange_awaited(Exchange *self, void *Py_UNUSED(closure))
{
    const Call *call = self->call;
    bool awaits = call != NULL && call->answered < call->count;
    return awaits ? Py_BuildValue("id", (int)call->requests[call->answered].server, due_at(call)) : Py_NewRef(Py_None);
}

static PyGetSetDef exchange_getset[] = {
    {"sent", (getter)exchange_sent, NULL, "see _exchange.pyi", NULL},
    {"awaited", (getter)exchange_awaited, NULL, "see _exchange.pyi", NULL},
    {"view", (getter)exchange_view, NULL, "the view of its route", NULL},
    {"top_k", (getter)exchange_top_k, NULL, "experts of a token", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot exchange_slots[] = {
    {Py_tp_dealloc, exchange_dealloc},
    {Py_tp_methods, exchange_methods},
    {Py_tp_getset, exchange_getset},
    {Py_tp_doc, "see _exchange.pyi"},
    {0, NULL},
};

static PyType_Spec exchange_spec = {
    .name = "attention_client.exchange._exchange.Exchange",
    .basicsize = sizeof(Exchange),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = exchange_slots,
};

/* ---- module ------------------------------------------------------------------------------------------------ */

static PyTypeObject *
add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type != NULL && PyModule_AddType(module, (PyTypeObject *)type) < 0) {
        Py_CLEAR(type);
    }
    return (PyTypeObject *)type;
}

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_exchange", "The common case of a layer call.", -1, NULL, NULL, NULL, NULL, NULL,
};

/* The states of `Slots.answer_of`, and whether tensors can be read. */
static bool
add_numbers(PyObject *made)
{
    return PyModule_AddIntConstant(made, "reads_tensors", can_read_tensors()) == 0 &&
           PyModule_AddIntConstant(made, "AWAITED", ANSWER_AWAITED) == 0 &&
           PyModule_AddIntConstant(made, "REVOKED", ANSWER_REVOKED) == 0 &&
           PyModule_AddIntConstant(made, "WRONG", ANSWER_WRONG) == 0 &&
           PyModule_AddIntConstant(made, "CAME", ANSWER_CAME) == 0;
}

PyMODINIT_FUNC
PyInit__exchange(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made != NULL && (!load_tensors() || !add_numbers(made) ||
                         (slots_type = add_type(made, &slots_spec)) == NULL ||
                         (route_type = add_type(made, &route_spec)) == NULL ||
                         (exchange_type = add_type(made, &exchange_spec)) == NULL)) {
        Py_CLEAR(made);
    }
    return made;
}
