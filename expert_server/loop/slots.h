/* The server's verbs over the slots of its arena. All that serve a request call them: the loop's Python, slot after
 * slot; the compiled turn for a lone client (serve.c); and the simulation.
 *
 *     accept          claim the slot; if its flag is WRITTEN, copy the header once and validate the copy
 *     compute         the layer, from the slot into the slot
 *     write_answer    the result's header
 *     hand_over       WRITTEN to DONE, doorbell
 *     release         the slot may be granted again
 *
 * None reads a clock, waits or takes memory; the times are arguments. `accept` and `release` need Python's lock (the
 * GIL), which also protects the marks of the owners; the others run with it or without it.
 *
 * A claimed slot belongs to one client until its release (slot_ownership.py). That client may write to its bytes at any
 * time. So only the copy of the header is used, and the kernel reads each id once.
 *
 * EAAS_MUTANT puts in one of the faults that the tests must find.
 */
#ifndef EXPERT_SERVER_SLOTS_H
#define EXPERT_SERVER_SLOTS_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "../../eaas/wire/doorbell.h"
#include "../../eaas/wire/protocol.h"
#include "../kernels/direct.h"

#define MOST_PAIRS (1u << 16) /* T * K of a request that is computed in its slot: the kernel counts in int */

typedef enum {
    NO_REQUEST, /* the slot is not claimed: it has no request or no owner, or it was claimed before */
    FAULTY,     /* see `fault` */
    UNUSUAL,    /* it has a checksum or no time: only Python can answer it */
    PLAIN,
} Verdict;

/* What a slot is claimed for. */
typedef struct {
    Verdict verdict;
    Fault fault;
    uint32_t generation; /* the owner's, and not the header's word */
    int32_t doorbell;
    RequestHeader header; /* the private copy */
    PayloadLayout layout;
} Request;

/* The owners of the slots, which `SlotTable` keeps. */
typedef struct {
    uint8_t *busy;               /* the loop works on the slot, so it is not granted */
    const uint64_t *generations; /* 0: no owner */
    const int32_t *doorbells;
    const uint64_t *capacities;  /* two for each slot: most bytes of the owner's payload and result */
} Owners;

typedef struct {
    ptrdiff_t count;
    FlagLine *flags;
    Doorbell *doorbells;
    char *memory; /* the request header of slot 0 */
    size_t request_stride, slot_stride;
    SlotLimits limits;
    Owners owners;
    Request *requests;  /* one for each slot */
    uint64_t answered;  /* with a result */
} Slots;

static inline char *
request_at(const Slots *slots, ptrdiff_t slot)
{
    return slots->memory + (size_t)slot * slots->slot_stride;
}

/* Volatile: the compiler must not read a field in the slot again instead of the copy. */
static inline void
copy_header(const char *from, RequestHeader *header)
{
    const volatile uint64_t *words = (const volatile uint64_t *)from;
    uint64_t copy[sizeof(RequestHeader) / sizeof(uint64_t)];
    for (size_t i = 0; i < sizeof copy / sizeof *copy; i++) {
        copy[i] = words[i];
    }
    memcpy(header, copy, sizeof copy);
}

static inline Verdict
accept_slot(Slots *slots, ptrdiff_t slot)
{
    const Owners *owners = &slots->owners;
    Request *request = &slots->requests[slot];
    if (owners->busy[slot]) {
        return NO_REQUEST;
    }
    owners->busy[slot] = 1;
    request->generation = (uint32_t)owners->generations[slot];
    request->doorbell = owners->doorbells[slot];
    bool is_written = __atomic_load_n(&slots->flags[slot].value, __ATOMIC_ACQUIRE) == SLOT_WRITTEN;
#if EAAS_MUTANT == 11 /* the flag is not read again after the claim: the slot may have another owner by now */
    is_written = true;
#endif
    if (request->generation == 0 || request->doorbell < 0 || request->doorbell > slots->count || !is_written) {
        owners->busy[slot] = 0;
        return request->verdict = NO_REQUEST;
    }
    copy_header(request_at(slots, slot), &request->header);
    SlotLimits limits = slots->limits;
    limits.payload_capacity = owners->capacities[2 * slot];
    limits.result_capacity = owners->capacities[2 * slot + 1];
#if EAAS_MUTANT == 12 /* the owner's memory ends before the arena's slot does */
    limits = slots->limits;
#endif
    uint32_t generation = request->generation;
#if EAAS_MUTANT == 13 /* a former owner's request passes for the new one's */
    generation = request->header.generation;
#endif
    request->fault = request_fault(&request->header, &limits, generation, &request->layout);
#if EAAS_MUTANT == 14 /* the slot may be granted again while it is computed */
    owners->busy[slot] = 0;
#endif
    /* With a budget of 0 it has expired. Any other begins now. */
    bool is_plain = request->header.flags == 0 && request->header.budget_us != 0;
    return request->verdict = request->fault != FAULT_NONE ? FAULTY : is_plain ? PLAIN : UNUSUAL;
}

/* Compute an accepted request without a fault. False if this layer cannot: nothing has changed but bytes of the
 * result. */
static inline bool
compute_slot(const Slots *slots, ptrdiff_t slot, const DirectLayer *layer)
{
    const Request *request = &slots->requests[slot];
    const RequestHeader *header = &request->header;
    if (layer->hidden != header->hidden_size || header->dtype == WIRE_FLOAT16 ||
        (uint64_t)header->batch_size * header->top_k > MOST_PAIRS) {
        return false;
    }
    char *payload = request_at(slots, slot) + sizeof(RequestHeader);
    char *result = request_at(slots, slot) + slots->request_stride + sizeof(ResultHeader);
    return layer->run(layer, payload, header->dtype == WIRE_BFLOAT16,
                      (const int32_t *)(payload + request->layout.ids_offset),
                      (const float *)(payload + request->layout.scores_offset), (int)header->batch_size,
                      (int)header->top_k, (float *)result);
}

static inline uint64_t
whole_us(double seconds)
{
    return seconds >= 1e-6 ? (uint64_t)(seconds * 1e6) : 0;
}

/* Hand an answered slot to its client; nothing changes if it was revoked. */
static inline void
hand_over(Slots *slots, ptrdiff_t slot)
{
    uint32_t *flag = &slots->flags[slot].value;
    uint32_t written = SLOT_WRITTEN;
#if EAAS_MUTANT == 15 /* a revoked slot comes back to its former owner */
    __atomic_store_n(flag, SLOT_WRITTEN, __ATOMIC_RELAXED);
#endif
    if (__atomic_compare_exchange_n(flag, &written, SLOT_DONE, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
#if EAAS_MUTANT != 16 /* a client that sleeps is not woken */
        ring_doorbell(&slots->doorbells[slots->requests[slot].doorbell]);
#endif
    }
}

/* Write the answer's header, after the result if there is one; without a checksum. The times are those since the
 * request was first seen, and the part of it that went to other requests. */
static inline ResultHeader
write_answer(Slots *slots, ptrdiff_t slot, uint16_t status, uint64_t detail, double service_s, double queue_s)
{
    const Request *request = &slots->requests[slot];
    const RequestHeader *header = &request->header;
    ResultHeader answer = {
        .magic = WIRE_MAGIC,
        .version = WIRE_VERSION,
        .status = status,
        .generation = request->generation,
        .request_id = header->request_id,
        .detail = detail,
    };
    if (status == STATUS_OK) {
#if EAAS_MUTANT == 17 /* the client may have changed the slot's header since it was checked */
        header = (const RequestHeader *)request_at(slots, slot);
#endif
        answer.rows = header->batch_size;
        answer.hidden_size = header->hidden_size;
        answer.length = result_length(header->batch_size, header->hidden_size);
        answer.service_us = whole_us(service_s);
        answer.queue_us = whole_us(queue_s);
        if (answer.service_us == 0) {
            answer.service_us = 1; /* 0 means unknown */
        }
        /* Before the flag: a client with the answer finds it counted. */
        __atomic_fetch_add(&slots->answered, 1, __ATOMIC_RELAXED);
    }
#if EAAS_MUTANT == 18 /* the client sees DONE before the answer is there */
    hand_over(slots, slot);
#endif
    memcpy(request_at(slots, slot) + slots->request_stride, &answer, sizeof answer);
    return answer;
}

/* End the claim of a slot, whether or not it was handed over. */
static inline void
release_slot(Slots *slots, ptrdiff_t slot)
{
    slots->requests[slot].verdict = NO_REQUEST;
    slots->owners.busy[slot] = 0;
}

#endif
