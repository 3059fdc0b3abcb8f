/* Flags of slots with acquire/release order, and waits that spin and then sleep.
 *
 * Python does not order stores to shared memory, and a Python polling loop starves the other threads of its
 * process. So flags and bells are compiled; their meaning is not known here.
 *
 *     flag line (64 bytes)   | value u32 | unused                 |   one per slot
 *     bell line (64 bytes)   | seq u32   | sleepers u32 | unused  |   one per group of waiters
 *
 * A waiter sleeps on a bell (an eventcount: a futex on seq), so that one sleep covers many flags.
 *
 * Why no wake-up is lost:
 *
 *     waiter                                   ringer
 *     W1  sleepers += 1                        R1  flag = value   (before ring() is called)
 *     W2  full fence                           R2  full fence
 *     W3  s = seq                              R3  if sleepers == 0: return
 *     W4  check the flags again                R4  seq += 1
 *     W5  FUTEX_WAIT(seq, s)                   R5  FUTEX_WAKE(seq, all)
 *
 * The two fences make it impossible that R3 misses W1 and W4 misses R1. If R3 sees the sleeper, then either
 * W3 reads the seq of R4, and with it R1 (release/acquire), so that W4 sees the flag; or W3 reads the older
 * seq, and W5 returns at once (the kernel compares) or is woken by R5.
 *
 * A process killed in its sleep leaves sleepers too high. That costs one system call per ring, but no error.
 */
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>

#include "lines.h"
#include "spin.h"

#define MAX_VALUE 31                         /* A mask is a u32 with one bit per value. */
#define SIGNAL_CHECK_NS UINT64_C(250000000)  /* Longest delay of a Ctrl-C. */
#define MAX_TIMEOUT_US INT64_C(1000000000000000) /* 31 years; its nanoseconds fit in 64 bits. */
#define CHECKS_PER_CLOCK_READ 16              /* A clock read costs more than a check of a flag. */
/* Limit of a longer spin that is likely to avoid a sleep: a wake-up costs both sides more than the spin. */
#define SPIN_STRETCH 10
#define USUAL_WEIGHT 8 /* Weight of one wait in the average: an eighth. */

/* ---- waiting, without Python ------------------------------------------------------------------------- */

typedef struct {
    const FlagLine *flags; /* the first flag to check */
    Py_ssize_t count;
    uint32_t mask;
    BellLine *bell;
    int64_t seen_seq; /* negative: ignore the bell's seq */
    uint64_t spin_until_ns;
    uint64_t deadline_ns;
} Wait;

typedef enum {
    WAIT_READY,       /* a flag has a value of the mask */
    WAIT_RUNG,        /* seq differs from seen_seq */
    WAIT_EXPIRED,     /* the deadline has passed */
    WAIT_INTERRUPTED, /* check for signals, then continue */
} Outcome;

/* Not FUTEX_PRIVATE, as in lines.h. */
static int
futex_wait(uint32_t *word, uint32_t expected, uint64_t timeout_ns)
{
    struct timespec timeout = {
        .tv_sec = (time_t)(timeout_ns / UINT64_C(1000000000)),
        .tv_nsec = (long)(timeout_ns % UINT64_C(1000000000)),
    };
    if (syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, NULL, 0) == 0) {
        return 0;
    }
    return errno;
}

static inline bool
flag_matches(const FlagLine *flag, uint32_t mask)
{
    uint32_t value = __atomic_load_n(&flag->value, __ATOMIC_ACQUIRE);
    /* A peer can write any u32 there; a shift by more than 31 is undefined. */
    return value <= MAX_VALUE && ((mask >> value) & 1u) != 0;
}

static bool
any_ready(const Wait *wait)
{
    for (Py_ssize_t i = 0; i < wait->count; i++) {
        if (flag_matches(&wait->flags[i], wait->mask)) {
            return true;
        }
    }
    return false;
}

static bool
bell_rung(const Wait *wait)
{
    if (wait->seen_seq < 0) {
        return false;
    }
    return __atomic_load_n(&wait->bell->seq, __ATOMIC_ACQUIRE) != (uint32_t)wait->seen_seq;
}

/* Sleep until a ring, at most timeout_ns. Returns 0 or the errno of FUTEX_WAIT. */
static int
sleep_on_bell(const Wait *wait, uint64_t timeout_ns)
{
    int error = 0;
    __atomic_fetch_add(&wait->bell->sleepers, 1, __ATOMIC_SEQ_CST);
    /* Not implied on AArch64: there a load may still pass the store half of the addition. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    uint32_t seq = __atomic_load_n(&wait->bell->seq, __ATOMIC_ACQUIRE);
    if (!any_ready(wait) && !bell_rung(wait)) {
        error = futex_wait(&wait->bell->seq, seq, timeout_ns);
    }
    __atomic_fetch_sub(&wait->bell->sleepers, 1, __ATOMIC_SEQ_CST);
    return error;
}

/* Spin, then sleep, at most SIGNAL_CHECK_NS. Runs without the GIL. */
static Outcome
wait_slice(const Wait *wait)
{
    uint64_t now = now_ns();
    uint64_t slice_end = now + SIGNAL_CHECK_NS;
    if (slice_end > wait->deadline_ns) {
        slice_end = wait->deadline_ns;
    }
    while (now < slice_end && now < wait->spin_until_ns) {
        for (int i = 0; i < CHECKS_PER_CLOCK_READ; i++) {
            if (any_ready(wait)) {
                return WAIT_READY;
            }
            if (bell_rung(wait)) {
                return WAIT_RUNG;
            }
            cpu_relax();
        }
        now = now_ns();
    }
    /* A ring for another flag ends one iteration, and the next one sleeps again. */
    while (now < slice_end) {
        int error = sleep_on_bell(wait, slice_end - now);
        if (any_ready(wait)) {
            return WAIT_READY;
        }
        if (bell_rung(wait)) {
            return WAIT_RUNG;
        }
        if (error == EINTR) {
            return WAIT_INTERRUPTED;
        }
        now = now_ns();
    }
    return now >= wait->deadline_ns ? WAIT_EXPIRED : WAIT_INTERRUPTED;
}

/* ---- the Python class ----------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Py_buffer view;
    FlagLine *flags;
    BellLine *bells;
    Py_ssize_t count;
    Py_ssize_t bell_count;
    Py_ssize_t waiting; /* threads inside wait(); they run without the GIL and use the buffer */
    uint64_t usual_ns;  /* average duration of waits with a bounded spin, bounded itself */
    bool released;
} Flags;

static void
drop_buffer(Flags *self)
{
    if (self->view.obj != NULL) {
        PyBuffer_Release(&self->view);
        self->view.obj = NULL;
    }
}

static bool
is_open(const Flags *self)
{
    if (self->released) {
        PyErr_SetString(PyExc_ValueError, "the flags were released");
        return false;
    }
    return true;
}

/* Find `count` lines at `offset`, or set ValueError and return NULL. */
static void *
lines_at(const Py_buffer *view, Py_ssize_t offset, Py_ssize_t count, const char *what)
{
    if (offset < 0 || count < 1 || offset > view->len || count > (view->len - offset) / LINE_BYTES) {
        PyErr_Format(PyExc_ValueError, "%zd %s at offset %zd do not lie in a buffer of %zd bytes", count,
                     what, offset, view->len);
        return NULL;
    }
    char *lines = (char *)view->buf + offset;
    if ((uintptr_t)lines % LINE_BYTES != 0) {
        PyErr_Format(PyExc_ValueError, "the %s at offset %zd are not aligned to 64 bytes", what, offset);
        return NULL;
    }
    return lines;
}

static PyObject *
flags_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer", "flags_offset", "count", "bells_offset", "bells", NULL};
    PyObject *buffer;
    Py_ssize_t flags_offset;
    Py_ssize_t count;
    Py_ssize_t bells_offset;
    Py_ssize_t bell_count;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Onnnn:Flags", names, &buffer, &flags_offset, &count,
                                     &bells_offset, &bell_count)) {
        return NULL;
    }
    Flags *self = (Flags *)PyType_GenericAlloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    if (PyObject_GetBuffer(buffer, &self->view, PyBUF_WRITABLE) < 0) {
        self->view.obj = NULL;
        Py_DECREF(self);
        return NULL;
    }
    self->count = count;
    self->bell_count = bell_count;
    self->flags = lines_at(&self->view, flags_offset, count, "flags");
    if (self->flags == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    self->bells = lines_at(&self->view, bells_offset, bell_count, "bells");
    if (self->bells == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void
flags_dealloc(Flags *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    drop_buffer(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* -- arguments: each function returns false with an exception set -- */

static bool
check_arity(const char *name, Py_ssize_t given, Py_ssize_t wanted)
{
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments, %zd given", name, wanted, given);
        return false;
    }
    return true;
}

static bool
check_range(Py_ssize_t first, Py_ssize_t count, Py_ssize_t limit, const char *what)
{
    if (first < 0 || count < 0 || first > limit || count > limit - first) {
        PyErr_Format(PyExc_IndexError, "%s %zd (+%zd) of %zd", what, first, count, limit);
        return false;
    }
    return true;
}

static bool
parse_size(PyObject *object, Py_ssize_t *size)
{
    *size = PyNumber_AsSsize_t(object, PyExc_IndexError);
    return *size != -1 || !PyErr_Occurred();
}

/* Find a flag or a bell; NULL with an exception set. */

static FlagLine *
flag_at(const Flags *self, PyObject *index)
{
    Py_ssize_t i;
    bool found = is_open(self) && parse_size(index, &i) && check_range(i, 1, self->count, "flag");
    return found ? &self->flags[i] : NULL;
}

static BellLine *
bell_at(const Flags *self, PyObject *index)
{
    Py_ssize_t i;
    bool found = is_open(self) && parse_size(index, &i) && check_range(i, 1, self->bell_count, "bell");
    return found ? &self->bells[i] : NULL;
}

static bool
parse_limited(PyObject *object, long long limit, const char *what, uint32_t *number)
{
    long long value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) {
        return false;
    }
    if (value < 0 || value > limit) {
        PyErr_Format(PyExc_ValueError, "%s must be in 0..%lld", what, limit);
        return false;
    }
    *number = (uint32_t)value;
    return true;
}

/* -- methods -- */

static PyObject *
flags_load(Flags *self, PyObject *index)
{
    FlagLine *flag = flag_at(self, index);
    return flag == NULL ? NULL : PyLong_FromUnsignedLong(__atomic_load_n(&flag->value, __ATOMIC_ACQUIRE));
}

static PyObject *
flags_exchange(Flags *self, PyObject *const *args, Py_ssize_t nargs)
{
    FlagLine *flag;
    uint32_t value;
    if (!check_arity("exchange", nargs, 2) || (flag = flag_at(self, args[0])) == NULL ||
        !parse_limited(args[1], MAX_VALUE, "a flag's value", &value)) {
        return NULL;
    }
    return PyLong_FromUnsignedLong(__atomic_exchange_n(&flag->value, value, __ATOMIC_SEQ_CST));
}

static PyObject *
flags_compare_exchange(Flags *self, PyObject *const *args, Py_ssize_t nargs)
{
    FlagLine *flag;
    uint32_t expected;
    uint32_t value;
    if (!check_arity("compare_exchange", nargs, 3) || (flag = flag_at(self, args[0])) == NULL ||
        !parse_limited(args[1], MAX_VALUE, "a flag's value", &expected) ||
        !parse_limited(args[2], MAX_VALUE, "a flag's value", &value)) {
        return NULL;
    }
    return PyBool_FromLong(exchange_flag(flag, expected, value));
}

static PyObject *
flags_ring(Flags *self, PyObject *index)
{
    BellLine *bell = bell_at(self, index);
    if (bell == NULL) {
        return NULL;
    }
    ring_bell(bell);
    Py_RETURN_NONE;
}

static PyObject *
flags_interrupt(Flags *self, PyObject *index)
{
    BellLine *bell = bell_at(self, index);
    if (bell == NULL) {
        return NULL;
    }
    bump_and_wake(bell);
    Py_RETURN_NONE;
}

static PyObject *
flags_seq(Flags *self, PyObject *index)
{
    BellLine *bell = bell_at(self, index);
    return bell == NULL ? NULL : PyLong_FromUnsignedLong(__atomic_load_n(&bell->seq, __ATOMIC_ACQUIRE));
}

static PyObject *
list_ready(const Flags *self, Py_ssize_t first, Py_ssize_t count, uint32_t mask)
{
    PyObject *ready = PyList_New(0);
    if (ready == NULL) {
        return NULL;
    }
    for (Py_ssize_t i = first; i < first + count; i++) {
        if (!flag_matches(&self->flags[i], mask)) {
            continue;
        }
        PyObject *index = PyLong_FromSsize_t(i);
        if (index == NULL || PyList_Append(ready, index) < 0) {
            Py_XDECREF(index);
            Py_DECREF(ready);
            return NULL;
        }
        Py_DECREF(index);
    }
    return ready;
}

static PyObject *
flags_scan(Flags *self, PyObject *const *args, Py_ssize_t nargs)
{
    Py_ssize_t first;
    Py_ssize_t count;
    uint32_t mask;
    if (!is_open(self) || !check_arity("scan", nargs, 3) || !parse_size(args[0], &first) ||
        !parse_size(args[1], &count) || !check_range(first, count, self->count, "flags") ||
        !parse_limited(args[2], UINT32_MAX, "a mask", &mask)) {
        return NULL;
    }
    return list_ready(self, first, count, mask);
}

/* One slice without the GIL. Returns false with an exception set: a signal's, or that of is_open. */
static bool
wait_without_gil(Flags *self, const Wait *wait, Outcome *outcome)
{
    self->waiting++;
    Py_BEGIN_ALLOW_THREADS
    *outcome = wait_slice(wait);
    Py_END_ALLOW_THREADS
    self->waiting--;
    if (self->released && self->waiting == 0) {
        drop_buffer(self);
    }
    if (PyErr_CheckSignals() < 0) {
        return false;
    }
    return is_open(self); /* A signal's handler may have released it, too. */
}

/* Spin twice the usual duration of a wait, if that is within the stretch; else a longer spin only burns the
 * core. */
static uint64_t
stretched_spin(const Flags *self, uint64_t spin_ns)
{
    uint64_t wanted = 2 * self->usual_ns;
    return wanted > spin_ns && wanted <= SPIN_STRETCH * spin_ns ? wanted : spin_ns;
}

static void
learn_wait(Flags *self, uint64_t waited_ns, uint64_t spin_ns)
{
    /* Bounded, so that the average soon falls after a long pause. */
    uint64_t most_ns = SPIN_STRETCH * spin_ns;
    uint64_t sample = waited_ns < most_ns ? waited_ns : most_ns;
    self->usual_ns = self->usual_ns - self->usual_ns / USUAL_WEIGHT + sample / USUAL_WEIGHT;
}

static PyObject *
flags_wait(Flags *self, PyObject *args)
{
    Py_ssize_t first;
    Py_ssize_t count;
    PyObject *mask_object;
    Py_ssize_t bell;
    long long seen_seq;
    long long spin_us;
    long long timeout_us;
    uint32_t mask;
    if (!is_open(self) ||
        !PyArg_ParseTuple(args, "nnOnLLL:wait", &first, &count, &mask_object, &bell, &seen_seq, &spin_us,
                          &timeout_us) ||
        !check_range(first, count, self->count, "flags") ||
        !check_range(bell, 1, self->bell_count, "bell") ||
        !parse_limited(mask_object, UINT32_MAX, "a mask", &mask)) {
        return NULL;
    }
    if (timeout_us < 0 || timeout_us > MAX_TIMEOUT_US || seen_seq > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "timeout_us or seen_seq is out of range");
        return NULL;
    }
    bool adapt = spin_us > 0 && spin_us <= timeout_us && spin_us <= MAX_TIMEOUT_US / SPIN_STRETCH;
    if (spin_us < 0 || spin_us > timeout_us) {
        spin_us = timeout_us;
    }
    uint64_t start = now_ns();
    uint64_t asked_ns = (uint64_t)spin_us * 1000;
    uint64_t spin_ns = adapt ? stretched_spin(self, asked_ns) : asked_ns;
    Wait wait = {
        .flags = &self->flags[first],
        .count = count,
        .mask = mask,
        .bell = &self->bells[bell],
        .seen_seq = seen_seq,
        .spin_until_ns = start + spin_ns,
        .deadline_ns = start + (uint64_t)timeout_us * 1000,
    };
    Outcome outcome = bell_rung(&wait) ? WAIT_RUNG : WAIT_INTERRUPTED;
    for (;;) {
        /* Scan again after WAIT_READY: flags may have changed while waiting for the GIL. */
        PyObject *ready = list_ready(self, first, count, mask);
        if (ready == NULL || PyList_Size(ready) > 0) {
            return ready;
        }
        if (outcome == WAIT_RUNG || outcome == WAIT_EXPIRED) {
            return ready;
        }
        Py_DECREF(ready);
        if (!wait_without_gil(self, &wait, &outcome)) {
            return NULL;
        }
        if (adapt && outcome != WAIT_INTERRUPTED) {
            learn_wait(self, now_ns() - start, asked_ns);
        }
    }
}

/* Order earlier loads before later ones: implied on x86, not on AArch64. */
static PyObject *
flags_fence(Flags *Py_UNUSED(self), PyObject *Py_UNUSED(ignored))
{
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    Py_RETURN_NONE;
}

static PyObject *
flags_release(Flags *self, PyObject *Py_UNUSED(ignored))
{
    self->released = true;
    if (self->waiting == 0) {
        drop_buffer(self);
    }
    Py_RETURN_NONE;
}

#define FAST(function) ((PyCFunction)(void (*)(void))(function))

static PyMethodDef flags_methods[] = {
    {"load", (PyCFunction)flags_load, METH_O, "load(i) -> int: the flag's value (acquire)"},
    {"exchange", FAST(flags_exchange), METH_FASTCALL, "exchange(i, value) -> int: set it, return the old value"},
    {"compare_exchange", FAST(flags_compare_exchange), METH_FASTCALL,
     "compare_exchange(i, expect, value) -> bool: set it if it is `expect` (release)"},
    {"ring", (PyCFunction)flags_ring, METH_O, "ring(bell): wake sleepers, after setting a flag"},
    {"interrupt", (PyCFunction)flags_interrupt, METH_O, "interrupt(bell): wake all, and change seq"},
    {"seq", (PyCFunction)flags_seq, METH_O, "seq(bell) -> int: changes with each interrupt"},
    {"scan", FAST(flags_scan), METH_FASTCALL, "scan(first, count, mask) -> list of ready indices"},
    {"wait", (PyCFunction)flags_wait, METH_VARARGS,
     "wait(first, count, mask, bell, seen_seq, spin_us, timeout_us) -> list of ready indices"},
    {"fence", (PyCFunction)flags_fence, METH_NOARGS, "fence(): acquire fence"},
    {"release", (PyCFunction)flags_release, METH_NOARGS, "release(): drop the buffer"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot flags_slots[] = {
    {Py_tp_new, flags_new},
    {Py_tp_dealloc, flags_dealloc},
    {Py_tp_methods, flags_methods},
    {Py_tp_doc, "Flags(buffer, flags_offset, count, bells_offset, bells): see _flags.pyi"},
    {0, NULL},
};

static PyType_Spec flags_spec = {
    .name = "eaas.wire._flags.Flags",
    .basicsize = sizeof(Flags),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = flags_slots,
};

static int
module_exec(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &flags_spec, NULL);
    if (type == NULL) {
        return -1;
    }
    int result = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return result;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_flags",
    .m_doc = "The flag primitive of the slots.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC
PyInit__flags(void)
{
    return PyModuleDef_Init(&module_definition);
}
