/* The memory of a route's layer calls: so many blocks, made at once, each for one call at a time.
 *
 * A call holds a block from `start` until its end. It asks each server for one slot at most, so it has no more tokens than
 * fit into one slot of each: a block has room for them, and no block grows. Pages that no call touches cost nothing.
 */
#ifndef EAAS_EXCHANGE_CALLS_H
#define EAAS_EXCHANGE_CALLS_H

#include "exchange.h"

#include "../dispatch/memory.h"

/* Calls at a time; those beyond are not of the common case. */
#define MOST_CALLS 16
#define MOST_PARTS 64

typedef struct {
    Slots *slots; /* a reference */
    int32_t server, slot;
    Part part;
    bool sent;  /* handed over */
    bool exact; /* the answer came while it was waited for */
    double work, pairs, sent_at, hedge_at, expires_at, arrived_at, service_s, queue_s;
} Request;

/* A layer call: the requests in flight, with their tokens and experts. */
typedef struct {
    PyObject *x; /* the hidden states, a reference: the result is made like them */
    Inputs inputs;
    Py_ssize_t tokens, hidden;
    uint64_t pairs, nonfinite;
    double started_at;
    int count;
    int answered; /* the first ones have their answers */
    bool busy;    /* a method runs */
    /* The room of the block. */
    float *row_H;
    int64_t *rows_R;
    int32_t *ids_RK;
    Request requests[MOST_PARTS];
} Call;

typedef struct {
    void *memory; /* NULL: none yet */
    int64_t most_rows, most_pairs; /* of a call; its tokens are no more than its rows */
    Call *free_calls[MOST_CALLS];
    int free_count;
    /* Scratch of `start`. */
    int64_t *ids_P, *count_S;
    double *work_S, *pairs_S;
    uint8_t *wanted_P;
    void *workspace; /* of route.h */
} Calls;

/* Lay out `memory`, or none if it is NULL. Returns the bytes. */
static inline size_t
lay_out_calls(Calls *calls, char *memory, Py_ssize_t hidden, Py_ssize_t servers, size_t workspace_bytes)
{
    size_t used = 0;
    calls->ids_P = take_array(memory, &used, calls->most_pairs, sizeof(int64_t));
    calls->wanted_P = take_array(memory, &used, calls->most_pairs, 1);
    calls->count_S = take_array(memory, &used, servers, sizeof(int64_t));
    calls->work_S = take_array(memory, &used, servers, sizeof(double));
    calls->pairs_S = take_array(memory, &used, servers, sizeof(double));
    calls->workspace = take_array(memory, &used, 1, workspace_bytes);
    for (int i = 0; i < MOST_CALLS; i++) {
        Call room, *call = take_array(memory, &used, 1, sizeof(Call));
        calls->free_calls[i] = call;
        call = call == NULL ? &room : call;
        call->row_H = take_array(memory, &used, hidden, sizeof(float));
        call->rows_R = take_array(memory, &used, calls->most_rows, sizeof(int64_t));
        call->ids_RK = take_array(memory, &used, calls->most_pairs, sizeof(int32_t));
    }
    return used;
}

/* A block for a call of so many pairs, or NULL if there is none. */
static inline Call *
take_call(Calls *calls, int64_t tokens, int64_t top_k)
{
    bool fits = calls->free_count > 0 && tokens <= calls->most_rows && tokens * top_k <= calls->most_pairs;
    if (!fits) {
        return NULL;
    }
    Call *call = calls->free_calls[--calls->free_count];
    call->count = call->answered = 0;
    call->busy = false;
    return call;
}

static inline void
give_call(Calls *calls, Call *call)
{
    assert(calls->free_count < MOST_CALLS && call->count == 0);
    calls->free_calls[calls->free_count++] = call;
}

#endif
