/* One request: validate it in its slot, compute it there, and hand the slot to its client. */
#include "slots.h"

#define MOST_PAIRS (1u << 16) /* T * K of a request that is computed at once: the kernel counts in int */

/* ---- the slot, without Python ------------------------------------------------------------------------ */

/* Volatile: the compiler must not read a field in the slot again instead of the copy. */
static void
copy_header(const char *from, RequestHeader *header)
{
    const volatile uint64_t *words = (const volatile uint64_t *)from;
    uint64_t copy[sizeof(RequestHeader) / sizeof(uint64_t)];
    for (size_t i = 0; i < sizeof copy / sizeof *copy; i++) {
        copy[i] = words[i];
    }
    memcpy(header, copy, sizeof copy);
}

/* Whether this is a valid request of the plain kind; sets its layout. */
static bool
is_plain(Request *request, const SlotLimits *limits, uint64_t generation)
{
    const RequestHeader *header = &request->header;
    if (generation > UINT32_MAX ||
        request_fault(header, limits, (uint32_t)generation, &request->layout) != FAULT_NONE) {
        return false;
    }
    /* With a budget of 0 it has expired. Any other begins now. */
    return header->flags == 0 && header->budget_us != 0 &&
           (header->dtype == WIRE_FLOAT32 || header->dtype == WIRE_BFLOAT16) &&
           (uint64_t)header->batch_size * header->top_k <= MOST_PAIRS;
}

static uint64_t
service_us(double seconds)
{
    /* 0 means unknown. */
    return seconds >= 1e-6 ? (uint64_t)(seconds * 1e6) : 1;
}

/* Compute and reply. Returns false if the kernel cannot. */
static bool
answer_slot(Direct *self, const Request *request, const DirectLayer *layer, BellLine *bell, double seen_at,
            double *ended)
{
    const RequestHeader *header = &request->header;
    char *slot = self->slots + (size_t)request->slot * self->slot_stride;
    const char *payload = slot + sizeof(RequestHeader);
    char *result = slot + self->request_stride;
    if (!layer->run(layer, payload, header->dtype == WIRE_BFLOAT16,
                    (const int32_t *)(payload + request->layout.ids_offset),
                    (const float *)(payload + request->layout.scores_offset), (int)header->batch_size,
                    (int)header->top_k, (float *)(result + sizeof(ResultHeader)))) {
        return false;
    }
    *ended = now_s();
    const ResultHeader answer = {
        .magic = WIRE_MAGIC,
        .version = WIRE_VERSION,
        .status = STATUS_OK,
        .generation = header->generation,
        .request_id = header->request_id,
        .rows = header->batch_size,
        .hidden_size = header->hidden_size,
        .length = result_length(header->batch_size, header->hidden_size),
        .service_us = service_us(*ended - seen_at),
    };
    memcpy(result, &answer, sizeof answer);
    /* Before the flag: a client with the answer finds it counted. */
    __atomic_fetch_add(&self->answered, 1, __ATOMIC_RELAXED);
    uint32_t written = SLOT_WRITTEN;
    if (__atomic_compare_exchange_n(&self->flags[request->slot].value, &written, SLOT_DONE, false,
                                    __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        ring_bell(bell);
    }
    return true;
}

/* ---- with the GIL ---------------------------------------------------------------------------------------- */

static void
drop_view(Py_buffer *view)
{
    if (view->obj != NULL) {
        PyBuffer_Release(view);
        view->obj = NULL;
    }
}

void
drop_buffers(Direct *self)
{
    drop_view(&self->view);
    drop_view(&self->owners.busy);
    drop_view(&self->owners.generations);
    drop_view(&self->owners.bells);
    drop_view(&self->owners.capacities);
}

/* The layer of an accepted header, borrowed; NULL: only Python can call the kernel for it. */
static PyObject *
prepared_layer(const Direct *self, const RequestHeader *header)
{
    if ((Py_ssize_t)header->layer >= PyList_Size(self->layers)) {
        return NULL;
    }
    PyObject *capsule = PyList_GetItem(self->layers, (Py_ssize_t)header->layer);
    if (!PyCapsule_IsValid(capsule, DIRECT_LAYER)) {
        return NULL;
    }
    const DirectLayer *layer = PyCapsule_GetPointer(capsule, DIRECT_LAYER);
    return layer->hidden == header->hidden_size ? capsule : NULL;
}

bool
accept_slot(Direct *self, Py_ssize_t slot, unsigned long long generation)
{
    Py_CLEAR(self->request.layer);
    if (self->released || __atomic_load_n(&self->flags[slot].value, __ATOMIC_ACQUIRE) != SLOT_WRITTEN) {
        return false;
    }
    Request request = {.slot = slot};
    copy_header(self->slots + (size_t)slot * self->slot_stride, &request.header);
    const uint64_t *capacities = (const uint64_t *)self->owners.capacities.buf + 2 * slot;
    SlotLimits limits = self->limits;
    limits.payload_capacity = capacities[0];
    limits.result_capacity = capacities[1];
    if (!is_plain(&request, &limits, generation) ||
        (request.layer = prepared_layer(self, &request.header)) == NULL) {
        return false;
    }
    Py_INCREF(request.layer);
    self->request = request;
    return true;
}

bool
answer_accepted(Direct *self, Py_ssize_t bell, double seen_at, double *ended)
{
    Request request = self->request;
    self->request.layer = NULL;
    const DirectLayer *layer = PyCapsule_GetPointer(request.layer, DIRECT_LAYER);
    bool answered;
    self->in_use = true;
    Py_BEGIN_ALLOW_THREADS
    answered = answer_slot(self, &request, layer, &self->bells[bell], seen_at, ended);
    Py_END_ALLOW_THREADS
    self->in_use = false;
    Py_DECREF(request.layer);
    if (self->released) {
        drop_buffers(self);
    }
    return answered;
}
