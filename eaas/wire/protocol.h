/* The protocol of a slot: its numbers, the headers of a request and of its answer, lengths, and what is valid.
 *
 * Client and server compile this file, and Python reads the numbers from `_protocol`: nothing else states them
 * (drawing and states: slot.py). No function here reads a clock, waits or takes memory.
 *
 * Letters: T tokens, H hidden size, K experts per token (top-k).
 */
#ifndef EAAS_WIRE_PROTOCOL_H
#define EAAS_WIRE_PROTOCOL_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mutant.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the headers are little-endian"
#endif

#define WIRE_MAGIC 0x53616145u /* "EaaS" */
#define WIRE_VERSION 1         /* processes with different versions do not connect */
/* Every section of a slot begins at a multiple of this. */
#define WIRE_ALIGNMENT 64
/* Doorbell of the server, which clients ring after writing a request. */
#define DOORBELL 0
/* Bit of the flags of a request's header: both headers have checksums. */
#define CHECKSUM_FLAG 1
/* Detail of an INTERNAL answer to a damaged request; the client must not reuse its slot. */
#define DETAIL_DAMAGED 1
#define TRACE_BYTES 24

/* States of a slot's flag. */
enum { SLOT_FREE = 0, SLOT_WRITTEN = 1, SLOT_DONE = 2, SLOT_OFFLINE = 3 };
/* Dtypes of hidden states. */
enum { WIRE_FLOAT32 = 0, WIRE_BFLOAT16 = 1, WIRE_FLOAT16 = 2 };
#define WIRE_DTYPES 3
/* Statuses of an answer. */
enum {
    STATUS_OK = 0,
    STATUS_INVALID_ARGUMENT = 1,
    STATUS_STALE_PLACEMENT = 2,
    STATUS_INTERNAL = 3,
    STATUS_EXPIRED = 4,
};
#define WIRE_STATUSES 5

typedef struct {
    uint32_t magic;
    uint16_t version;
    uint8_t dtype;
    uint8_t flags;
    uint32_t generation;
    uint32_t checksum;
    uint64_t request_id;
    uint64_t epoch;
    uint64_t payload_length;
    uint64_t budget_us;
    uint32_t layer;
    uint32_t batch_size;
    uint32_t hidden_size;
    uint32_t top_k;
    uint8_t trace[TRACE_BYTES];
    uint8_t zeros[40];
} RequestHeader;

typedef struct {
    uint32_t magic;
    uint16_t version;
    uint16_t status;
    uint32_t generation;
    uint32_t checksum;
    uint64_t request_id;
    uint32_t rows;
    uint32_t hidden_size;
    uint64_t length;
    uint64_t detail;
    uint64_t service_us;
    uint64_t queue_us;
} ResultHeader;

_Static_assert(sizeof(RequestHeader) % WIRE_ALIGNMENT == 0, "the payload is aligned");
_Static_assert(sizeof(ResultHeader) % WIRE_ALIGNMENT == 0, "the result is aligned");
_Static_assert(offsetof(RequestHeader, checksum) == offsetof(ResultHeader, checksum), "one place of the checksum");

/* ---- lengths: they saturate, so that a length that fits nowhere is longer than any slot -------------------- */

static inline uint64_t
wire_sum(uint64_t one, uint64_t other)
{
    uint64_t sum;
    return __builtin_add_overflow(one, other, &sum) ? UINT64_MAX : sum;
}

static inline uint64_t
wire_product(uint64_t one, uint64_t other)
{
    uint64_t product;
    return __builtin_mul_overflow(one, other, &product) ? UINT64_MAX : product;
}

static inline uint64_t
wire_align(uint64_t length)
{
    return wire_sum(length, WIRE_ALIGNMENT - 1) / WIRE_ALIGNMENT * WIRE_ALIGNMENT;
}

static inline uint64_t
value_bytes(int dtype)
{
    return dtype == WIRE_FLOAT32 ? 4 : 2;
}

/* Offsets of a payload's sections from its start; the hidden states are at 0. */
typedef struct {
    uint64_t ids_offset, scores_offset, total;
} PayloadLayout;

static inline PayloadLayout
payload_layout(uint64_t tokens, uint64_t hidden, uint64_t top_k, int dtype)
{
    uint64_t pairs = wire_product(tokens, top_k);
    PayloadLayout layout;
    layout.ids_offset = wire_align(wire_product(wire_product(tokens, hidden), value_bytes(dtype)));
    layout.scores_offset = wire_sum(layout.ids_offset, wire_align(wire_product(pairs, sizeof(int32_t))));
    layout.total = wire_sum(layout.scores_offset, wire_product(pairs, sizeof(float)));
    return layout;
}

/* Bytes of a result, which is always float32. */
static inline uint64_t
result_length(uint64_t rows, uint64_t hidden)
{
    return wire_product(wire_product(rows, hidden), sizeof(float));
}

/* The most tokens that fit into a slot with their result. */
static inline uint64_t
max_tokens(uint64_t payload_capacity, uint64_t result_capacity, uint64_t hidden, uint64_t top_k, int dtype)
{
    uint64_t token = hidden * value_bytes(dtype) + top_k * (sizeof(int32_t) + sizeof(float));
    uint64_t tokens = payload_capacity / token, results = result_capacity / result_length(1, hidden);
    tokens = tokens < results ? tokens : results;
    /* Because two sections are aligned, fewer may fit. */
    uint64_t most = tokens;
    for (; tokens > 0 && payload_layout(tokens, hidden, top_k, dtype).total > payload_capacity; tokens--) {
        assert(most - tokens <= 2 * WIRE_ALIGNMENT / token);
    }
    return tokens;
}

/* ---- validation: no field is trusted ------------------------------------------------------------------------ */

/* What is wrong with the header of a request or of an answer. */
#define FAULTS(FAULT)                                                                                   \
    FAULT(NONE, "nothing")                                                                              \
    /* The bytes are no request of this connection, and no checksum can be verified. */                 \
    FAULT(MAGIC, "magic")                                                                               \
    FAULT(VERSION, "version")                                                                           \
    FAULT(GENERATION, "generation")                                                                     \
    FAULT(FLAGS, "flags")                                                                               \
    FAULT(CHECKSUM, "checksum")                                                                         \
    FAULT(PAYLOAD_CAPACITY, "payload length for the slot")                                              \
    /* An intact request that does not fit this server; without a checksum, perhaps a damaged one. */   \
    FAULT(DTYPE, "dtype")                                                                               \
    FAULT(HIDDEN_SIZE, "hidden size")                                                                   \
    FAULT(LAYER, "layer")                                                                               \
    FAULT(NO_TOKENS, "number of tokens or of experts per token")                                        \
    /* The header contradicts itself, its slot or, in an answer, the request. */                        \
    FAULT(LENGTH, "length of the payload or result")                                                    \
    FAULT(RESULT_CAPACITY, "size of the result for the slot")                                           \
    FAULT(REQUEST_ID, "request id")                                                                     \
    FAULT(STATUS, "status")                                                                             \
    FAULT(ROWS, "rows or hidden size")

#define FAULT_OF(name, words) FAULT_##name,
typedef enum { FAULTS(FAULT_OF) } Fault;
#undef FAULT_OF

/* For messages: "wrong ...". */
static inline const char *
fault_words(Fault fault)
{
#define WORDS_OF(name, words) words,
    static const char *const words[] = {FAULTS(WORDS_OF)};
#undef WORDS_OF
    return words[fault];
}

static inline bool
is_frame_fault(Fault fault)
{
    return fault != FAULT_NONE && fault < FAULT_DTYPE;
}

static inline bool
is_misfit(Fault fault)
{
    return fault >= FAULT_DTYPE && fault < FAULT_LENGTH;
}

/* What a server accepts. */
typedef struct {
    uint64_t payload_capacity, result_capacity, hidden_size, num_layers;
} SlotLimits;

/* Check a request; without a fault, `layout` is its payload's. The caller verifies a checksum before it believes any
 * fault but a frame's, so that a flipped bit is not taken for the client's mistake. */
static inline Fault
request_fault(const RequestHeader *header, const SlotLimits *limits, uint32_t generation, PayloadLayout *layout)
{
    if (header->magic != WIRE_MAGIC) {
        return FAULT_MAGIC;
    }
    if (header->version != WIRE_VERSION) {
        return FAULT_VERSION;
    }
    if (header->generation != generation) {
        return FAULT_GENERATION;
    }
    if ((header->flags & ~CHECKSUM_FLAG) != 0) {
        return FAULT_FLAGS;
    }
    if (header->flags == 0 && header->checksum != 0) {
        return FAULT_CHECKSUM;
    }
    if (header->payload_length > limits->payload_capacity) {
        return FAULT_PAYLOAD_CAPACITY;
    }
    if (header->dtype >= WIRE_DTYPES) {
        return FAULT_DTYPE;
    }
    if (header->hidden_size != limits->hidden_size) {
        return FAULT_HIDDEN_SIZE;
    }
    if (header->layer >= limits->num_layers) {
        return FAULT_LAYER;
    }
    if (header->batch_size == 0 || header->top_k == 0) {
        return FAULT_NO_TOKENS;
    }
    /* With the payload's capacity, this also limits the tokens and K. */
    *layout = payload_layout(header->batch_size, header->hidden_size, header->top_k, header->dtype);
    if (header->payload_length != layout->total) {
        return FAULT_LENGTH;
    }
    return result_length(header->batch_size, header->hidden_size) > limits->result_capacity ? FAULT_RESULT_CAPACITY
                                                                                           : FAULT_NONE;
}

/* A request that waits for its answer. */
typedef struct {
    uint64_t request_id, result_capacity;
    uint32_t generation, rows, hidden_size;
} Awaited;

/* Whether this is the header of an answer to this very request: of a result or of a refusal. */
static inline Fault
answer_fault(const ResultHeader *header, const Awaited *awaited)
{
    if (header->magic != WIRE_MAGIC) {
        return FAULT_MAGIC;
    }
    if (header->version != WIRE_VERSION) {
        return FAULT_VERSION;
    }
    if (!MUTANT(1) && header->generation != awaited->generation) {
        return FAULT_GENERATION;
    }
    if (!MUTANT(2) && header->request_id != awaited->request_id) {
        return FAULT_REQUEST_ID;
    }
    if (header->status >= WIRE_STATUSES) {
        return FAULT_STATUS;
    }
    if (header->status != STATUS_OK) {
        return header->rows != 0 || header->length != 0 ? FAULT_ROWS : FAULT_NONE;
    }
    /* A single row would broadcast in a sum. */
    if ((!MUTANT(3) && header->rows != awaited->rows) || header->hidden_size != awaited->hidden_size) {
        return FAULT_ROWS;
    }
    if (header->length != result_length(header->rows, header->hidden_size)) {
        return FAULT_LENGTH;
    }
    return header->length > awaited->result_capacity ? FAULT_RESULT_CAPACITY : FAULT_NONE;
}

#endif
