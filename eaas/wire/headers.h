/* Headers of a request and of its answer, as they lie in a slot (drawing: slot.py; mirrors header.py). */
#ifndef EAAS_WIRE_HEADERS_H
#define EAAS_WIRE_HEADERS_H

#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the headers are little-endian"
#endif

#define WIRE_MAGIC 0x53616145u /* "EaaS" */
#define WIRE_VERSION 1

/* States of a slot's flag. */
enum { SLOT_FREE = 0, SLOT_WRITTEN = 1, SLOT_DONE = 2, SLOT_OFFLINE = 3 };
/* Dtypes of hidden states. Float16 is not used in C. */
enum { WIRE_FLOAT32 = 0, WIRE_BFLOAT16 = 1 };
enum { STATUS_OK = 0 };

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
    uint64_t trace[8];
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

_Static_assert(sizeof(RequestHeader) == 128, "the padding is explicit");
_Static_assert(sizeof(ResultHeader) == 64, "the padding is explicit");

#endif
