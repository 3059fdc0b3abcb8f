/* A client's verbs on its slots: write, hand over, look for the answer, free.
 *
 * Every layer call uses them, in compiled code (exchange.c) and from Python (`Slots` in slots.c, for `Connection`). They
 * read no clock, wait for nothing and take no memory; states and headers are those of protocol.h.
 *
 *     write_request    FREE      request and header are in the slot, still the client's
 *     hand_over        FREE      -> WRITTEN
 *     answer_of        WRITTEN | DONE, and what the answer is worth
 *     free_slot        DONE      -> FREE
 *
 * The server may revoke a grant at any time, and give the slots to another client under another generation. So each
 * verb compares the generation: `write_request` before it writes, `answer_of` and `free_slot` after the reads that
 * they vouch for.
 */
#ifndef EAAS_EXCHANGE_SLOT_H
#define EAAS_EXCHANGE_SLOT_H

#include <string.h>

#include "../../eaas/wire/doorbell.h"
#include "../../eaas/wire/protocol.h"

/* The memory of the slots that a server has granted; slots have the numbers of the server's arena. */
typedef struct {
    FlagLine *flags;
    const uint32_t *generations;
    char *slots_at;
    size_t request_stride, result_stride;
    uint64_t payload_capacity, result_capacity;
    uint32_t generation, hidden;
} Grant;

/* The inputs of a layer call: T tokens, K experts of each. */
typedef struct {
    const char *x;       /* (T, H) */
    const float *scores; /* (T, K) */
    uint64_t epoch;
    uint32_t layer, top_k;
    int dtype;
} Inputs;

/* The part of a layer call that one request carries: R of its tokens. */
typedef struct {
    const int64_t *rows_R;
    const int32_t *ids_RK; /* -1: another request's */
    uint32_t rows;
    uint64_t request_id, budget_us;
    uint8_t flags;
} Part;

typedef enum {
    ANSWER_AWAITED, /* none yet */
    ANSWER_REVOKED, /* the slot is no longer the client's */
    ANSWER_WRONG,   /* not an answer to this request */
    ANSWER_CAME,
} AnswerState;

/* The most tokens of a request. */
static inline uint64_t
slot_tokens(const Grant *grant, uint32_t top_k, int dtype)
{
    return max_tokens(grant->payload_capacity, grant->result_capacity, grant->hidden, top_k, dtype);
}

static inline char *
request_at(const Grant *grant, int32_t slot)
{
    return grant->slots_at + (size_t)slot * (grant->request_stride + grant->result_stride);
}

static inline char *
result_at(const Grant *grant, int32_t slot)
{
    return request_at(grant, slot) + grant->request_stride;
}

/* Whether the slot is still the client's, after all reads of it so far. */
static inline bool
is_granted(const Grant *grant, int32_t slot)
{
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&grant->generations[slot], __ATOMIC_RELAXED) == grant->generation;
}

static inline bool
move_flag(const Grant *grant, int32_t slot, uint32_t from, uint32_t to)
{
    return __atomic_compare_exchange_n(&grant->flags[slot].value, &from, to, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

/* Fill a free slot with a request that fits. False, with nothing written: it is not the client's any more. */
static inline bool
write_request(const Grant *grant, int32_t slot, const Inputs *inputs, const Part *part)
{
    if (!MUTANT(4) && !is_granted(grant, slot)) {
        return false;
    }
    if (MUTANT(5)) {
        move_flag(grant, slot, SLOT_FREE, SLOT_WRITTEN);
    }
    size_t rows = part->rows, top_k = inputs->top_k, row_bytes = grant->hidden * value_bytes(inputs->dtype);
    PayloadLayout layout = payload_layout(rows, grant->hidden, top_k, inputs->dtype);
    char *at = request_at(grant, slot), *x_out = at + sizeof(RequestHeader), *scores_out = x_out + layout.scores_offset;
    for (size_t r = 0; r < rows; r++) {
        memcpy(x_out + r * row_bytes, inputs->x + (size_t)part->rows_R[r] * row_bytes, row_bytes);
        memcpy(scores_out + r * top_k * 4, inputs->scores + (MUTANT(6) ? r : (size_t)part->rows_R[r]) * top_k,
               top_k * 4);
    }
    memcpy(x_out + layout.ids_offset, part->ids_RK, rows * top_k * 4);
    const RequestHeader header = {
        .magic = WIRE_MAGIC,
        .version = WIRE_VERSION,
        .dtype = (uint8_t)inputs->dtype,
        .flags = part->flags,
        .generation = grant->generation,
        .request_id = part->request_id,
        .epoch = inputs->epoch,
        .payload_length = layout.total,
        .budget_us = part->budget_us,
        .layer = inputs->layer,
        .batch_size = part->rows,
        .hidden_size = grant->hidden,
        .top_k = inputs->top_k,
    };
    memcpy(at, &header, sizeof header);
    return true;
}

/* Give a written slot to the server. False: it has taken the slot back. */
static inline bool
hand_over(const Grant *grant, int32_t slot)
{
    return MUTANT(5) || move_flag(grant, slot, SLOT_FREE, SLOT_WRITTEN);
}

/* Look for the answer to a request of so many rows. `header` is set if it CAME; `fault` says what is WRONG. */
static inline AnswerState
answer_of(const Grant *grant, int32_t slot, uint64_t request_id, uint32_t rows, ResultHeader *header, Fault *fault)
{
    uint32_t state = __atomic_load_n(&grant->flags[slot].value, __ATOMIC_ACQUIRE);
    if (state == SLOT_WRITTEN) {
        return is_granted(grant, slot) ? ANSWER_AWAITED : ANSWER_REVOKED;
    }
    /* FREE: the server had taken the slot back before it was handed over. */
    if (state != SLOT_DONE) {
        return ANSWER_REVOKED;
    }
    memcpy(header, result_at(grant, slot), sizeof *header);
    if (!is_granted(grant, slot)) {
        return ANSWER_REVOKED;
    }
    const Awaited awaited = {request_id, grant->result_capacity, grant->generation, rows, grant->hidden};
    *fault = answer_fault(header, &awaited);
    return *fault == FAULT_NONE ? ANSWER_CAME : ANSWER_WRONG;
}

/* The result of an answer that came: float32 (R, H). What is read of it counts if `free_slot` succeeds afterwards. */
static inline const float *
result_of(const Grant *grant, int32_t slot)
{
    return (const float *)(result_at(grant, slot) + sizeof(ResultHeader));
}

/* Free an answered slot for the next request. False: it was not the client's any more. */
static inline bool
free_slot(const Grant *grant, int32_t slot)
{
    return (MUTANT(7) || is_granted(grant, slot)) && move_flag(grant, slot, SLOT_DONE, SLOT_FREE);
}

#endif
