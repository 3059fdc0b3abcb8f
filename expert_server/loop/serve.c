/* The compiled turn: one request after the other, while each is the only one and plain. */
#include "_slots.h"

/* What `serve` has done since its call. */
typedef struct {
    unsigned long long requests;
    double seconds, slowest;  /* slowest: seconds per token */
    Py_ssize_t slot;          /* of the last request */
    uint32_t layer, tokens;
    double began, ended;
} Served;

static double
now_s(void)
{
    return (double)now_ns() * 1e-9;
}

/* The only WRITTEN slot; -1: there is none, or another one. */
static Py_ssize_t
only_written(const Slots *slots)
{
    Py_ssize_t found = -1;
    for (Py_ssize_t slot = 0; slot < slots->count; slot++) {
        if (flag_matches(&slots->flags[slot], 1u << SLOT_WRITTEN)) {
            if (found >= 0) {
                return -1;
            }
            found = slot;
        }
    }
    return found;
}

static void
note(Served *served, Py_ssize_t slot, const RequestHeader *header, double began, double ended)
{
    double per_token = (ended - began) / header->batch_size;
    served->requests++;
    served->seconds += ended - began;
    served->slowest = per_token > served->slowest ? per_token : served->slowest;
    served->slot = slot;
    served->layer = header->layer;
    served->tokens = header->batch_size;
    served->began = began;
    served->ended = ended;
}

/* Accept, compute, reply. False: the request is left to Python, and nothing has changed. */
static bool
serve_slot(SlotsObject *self, Py_ssize_t slot, Served *served)
{
    Slots *slots = &self->slots;
    double began = now_s(), ended = 0.0;
    Verdict verdict = accept_slot(slots, slot);
    if (verdict == NO_REQUEST) {
        return false;
    }
    const RequestHeader *header = &slots->requests[slot].header;
    PyObject *capsule = verdict == PLAIN ? prepared_layer(self, slot) : NULL;
    bool answered = false;
    if (capsule != NULL) {
        const DirectLayer *layer = PyCapsule_GetPointer(capsule, DIRECT_LAYER);
        self->since = began;
        self->doing = header->batch_size;
        self->in_use = true;
        Py_BEGIN_ALLOW_THREADS
        answered = compute_slot(slots, slot, layer);
        if (answered) {
            ended = now_s();
            write_answer(slots, slot, STATUS_OK, 0, ended - began, 0.0);
            hand_over(slots, slot);
        }
        Py_END_ALLOW_THREADS
        self->in_use = false;
        self->doing = 0;
        Py_DECREF(capsule);
    }
    release_slot(slots, slot);
    if (answered) {
        note(served, slot, header, began, ended);
    }
    return answered;
}

/* Wait for a WRITTEN slot, without the GIL. */
static Outcome
wait_for_request(SlotsObject *self, int64_t seen, uint64_t now, uint64_t spin_most_ns, uint64_t until_ns)
{
    uint64_t spin_ns = spin_for(&self->spins, spin_most_ns);
    Wait wait = {
        .flags = self->slots.flags,
        .count = self->slots.count,
        .mask = 1u << SLOT_WRITTEN,
        .doorbell = &self->slots.doorbells[DOORBELL],
        .seen_seq = seen,
        .spin_until_ns = now + spin_ns,
        .deadline_ns = until_ns,
    };
    self->since = (double)until_ns * 1e-9;
    Outcome outcome;
    self->in_use = true;
    Py_BEGIN_ALLOW_THREADS
    outcome = wait_slice(&wait);
    Py_END_ALLOW_THREADS
    self->in_use = false;
    if (outcome == WAIT_READY) {
        learn_spin(&self->spins, now_ns() - now, spin_ns, spin_most_ns);
    }
    return outcome;
}

PyObject *
slots_serve(SlotsObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 4) {
        PyErr_SetString(PyExc_TypeError, "serve(spin_us, idle_us, most_us, once)");
        return NULL;
    }
    uint64_t limits_ns[3];
    for (int i = 0; i < 3; i++) {
        long long us = PyLong_AsLongLong(args[i]);
        if (us < 0) {
            if (!PyErr_Occurred()) {
                PyErr_SetString(PyExc_ValueError, "a negative time");
            }
            return NULL;
        }
        limits_ns[i] = (uint64_t)us * 1000;
    }
    int once = PyObject_IsTrue(args[3]);
    if (once < 0) {
        return NULL;
    }
    Served served = {.slot = -1};
    uint64_t until_ns = now_ns() + limits_ns[1];
    /* `leave` needs the GIL, and an interrupt that follows it changes the count. */
    while (!self->leaving && !self->closed) {
        int64_t seen = __atomic_load_n(&self->slots.doorbells[DOORBELL].seq, __ATOMIC_ACQUIRE);
        uint64_t now = now_ns();
        if (served.requests > 0 && (once || now >= until_ns)) {
            break;
        }
        Outcome outcome = wait_for_request(self, seen, now, limits_ns[0], until_ns);
        if (PyErr_CheckSignals() < 0) {
            return NULL;
        }
        if (outcome == WAIT_INTERRUPTED) {
            continue;
        }
        Py_ssize_t slot = outcome == WAIT_READY && !self->closed ? only_written(&self->slots) : -1;
        if (slot < 0 || !serve_slot(self, slot, &served)) {
            break;
        }
        if (served.requests == 1) {
            until_ns = now_ns() + limits_ns[2];
        }
    }
    self->leaving = false;
    return Py_BuildValue("(KddnIIdd)", served.requests, served.seconds, served.slowest, served.slot, served.layer,
                         served.tokens, served.began, served.ended);
}
