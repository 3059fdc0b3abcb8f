/* One request after the other, while each is the only one and plain. */
#include "slots.h"

/* The only WRITTEN slot; -1: there is none, or another one. */
static Py_ssize_t
only_written(const Direct *self)
{
    Py_ssize_t found = -1;
    for (Py_ssize_t slot = 0; slot < self->count; slot++) {
        if (flag_matches(&self->flags[slot], 1u << SLOT_WRITTEN)) {
            if (found >= 0) {
                return -1;
            }
            found = slot;
        }
    }
    return found;
}

/* Claim the slot, then answer its request; see slot_ownership.py for why the order is safe. False: nothing changed. */
static bool
serve_slot(Direct *self, Py_ssize_t slot, Served *served)
{
    uint8_t *busy = (uint8_t *)self->owners.busy.buf + slot;
    double seen_at = now_s(), ended = 0.0;
    *busy = 1;
    uint64_t generation = ((const uint64_t *)self->owners.generations.buf)[slot];
    int32_t bell = ((const int32_t *)self->owners.bells.buf)[slot];
    bool answered = false;
    if (generation != 0 && bell >= 0 && bell <= self->count && accept_slot(self, slot, generation)) {
        served->layer = self->request.header.layer;
        served->tokens = self->doing = self->request.header.batch_size;
        self->since = seen_at;
        answered = answer_accepted(self, bell, seen_at, &ended);
        self->doing = 0;
    }
    if (!self->released) {
        *busy = 0;
    }
    if (answered) {
        double per_token = (ended - seen_at) / served->tokens;
        served->requests++;
        served->seconds += ended - seen_at;
        served->slowest = per_token > served->slowest ? per_token : served->slowest;
        served->slot = slot;
        served->began = seen_at;
        served->ended = ended;
    }
    return answered;
}

PyObject *
direct_serve(Direct *self, PyObject *const *args, Py_ssize_t nargs)
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
    BellLine *doorbell = &self->bells[DOORBELL];
    for (;;) {
        /* Before the other reasons to return: a later interrupt changes this count. */
        int64_t seen = __atomic_load_n(&doorbell->seq, __ATOMIC_ACQUIRE);
        if (self->released || self->leaving) {
            break;
        }
        uint64_t now = now_ns();
        if (served.requests > 0 && (once || now >= until_ns)) {
            break;
        }
        uint64_t spin_ns = spin_for(&self->spins, limits_ns[0]);
        Wait wait = {
            .flags = self->flags,
            .count = self->count,
            .mask = 1u << SLOT_WRITTEN,
            .bell = doorbell,
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
            learn_spin(&self->spins, now_ns() - now, spin_ns, limits_ns[0]);
        }
        if (PyErr_CheckSignals() < 0) {
            return NULL;
        }
        if (outcome == WAIT_INTERRUPTED) {
            continue;
        }
        Py_ssize_t slot = outcome == WAIT_READY && !self->released ? only_written(self) : -1;
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
