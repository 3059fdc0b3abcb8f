/* A kernel that stays on the device: it polls the slots itself, computes a request's experts and replies, without the
 * CPU. Never run on a GPU, and no server starts it (ADR 0047 says what is missing).
 *
 * For decoding: weights are read once for every ROWS rows of an expert, with plain multiplications, so it needs few
 * rows per expert. bfloat16 weights in blocks (packing.py), bfloat16 hidden states.
 *
 * All blocks must be on the device at once. A warp of block 0 polls (poll.h). The others wait in `meet` until it has
 * found a request; then all lanes go through the same steps, and meet after each:
 *
 *     gather    the slot's bytes to device memory, once: a client may change them at any time
 *     sort      pairs (token * top_k + k) by expert
 *     up        h[row] = activation(up[expert] x[token])        a warp computes a channel for ROWS rows
 *     down      y[pair] = score[pair] * (down[expert] h[row])
 *     combine   result[token] = sum of y over k, in order, into the slot
 *
 * An expert's address is 0 in `table` while it is not held. To unload one, the host stores 0, then reads `begun`, and
 * waits until `ended` has reached it; the device stores `begun` before it reads the table.
 *
 * The same text compiles for a device (NVRTC) and for threads of the host, where a warp has one lane.
 */
#pragma once

#include "numbers.h"

#ifndef _Static_assert
#define _Static_assert static_assert
#endif
#ifdef __CUDACC_RTC__
#include "headers.h"
#else
#include "eaas/wire/headers.h"
#endif

/* Of header.py's Status. */
enum { REPLY_OK, REPLY_INVALID_ARGUMENT, REPLY_STALE_PLACEMENT, REPLY_INTERNAL, REPLY_EXPIRED };
/* Words between the words of neighbouring slots. */
enum { LINE_WORDS = 16 };

/* What the blocks compute next; block 0 writes it before they meet. */
struct Job {
    word over, slot, owner, status;
    RequestHeader header;
};

struct Persistent {
    /* In the host's memory: slots, a word on a line of its own for each, and words of the whole. */
    uint8_t *slots;
    uint64_t request_bytes, slot_bytes;
    word *flags, *busy, *generations;
    const uint64_t *table; /* (layers, experts) */
    word *begun, *ended;
    const word *stop;
    /* Limits. pairs: most token-expert pairs of a request. */
    uint64_t payload_capacity, result_capacity;
    word count, hidden, layers, experts, pairs;
    /* The experts' blocks: offsets in bytes, padded inputs of both products. */
    word intermediate, up_inputs, down_inputs, has_up_bias, has_down_bias;
    Activation activation;
    uint64_t up_at, down_at, up_bias_at, down_bias_at;
    /* In the device's memory. Scratch of `pairs` rows. */
    Job *job;
    word *arrived, *bad;
    word *x;             /* (pairs, up_inputs) bfloat16 */
    int32_t *ids;
    uint64_t *addresses; /* of each pair's expert */
    float *scores;
    word *order;         /* pairs by expert */
    int32_t *order_ids;
    uint16_t *h;         /* (pairs, down_inputs) bfloat16 */
    float *y;            /* (pairs, hidden) */
};

/* ---- between blocks ---------------------------------------------------------------------------------- */

/* Wait until all lanes of all blocks are here; what they wrote before is visible after. */
POLL void meet(const Persistent &p, word &meetings)
{
    sync_block();
    meetings += BLOCKS;
    if (LANE == 0) {
        add_device(p.arrived);
        /* The difference, since the count wraps. */
        while ((int32_t)(load_device(p.arrived) - meetings) < 0) {
            rest();
        }
    }
    sync_block();
}

/* ---- a request --------------------------------------------------------------------------------------- */

POLL PolledSlot polled_at(const Persistent &p, word slot)
{
    word line = slot * LINE_WORDS;
    return {p.flags + line, p.busy + line, p.generations + line};
}

POLL uint8_t *request_at(const Persistent &p, word slot) { return p.slots + slot * p.slot_bytes; }

POLL uint64_t align_line(uint64_t length) { return (length + 63) / 64 * 64; }

POLL uint64_t ids_at(const RequestHeader &h) { return align_line(2ull * h.batch_size * h.hidden_size); }

POLL uint64_t scores_at(const RequestHeader &h)
{
    return ids_at(h) + align_line(4ull * h.batch_size * h.top_k);
}

/* As `validate_request` of slot.py, for requests that this kernel takes; the header is a copy. */
POLL word status_of(const Persistent &p, const RequestHeader &h, word owner)
{
    if (h.magic != WIRE_MAGIC || h.version != WIRE_VERSION || h.generation != owner || h.flags != 0 ||
        h.checksum != 0) {
        return REPLY_INTERNAL;
    }
    /* Below 2^32 each, so that no product overflows 64 bits. */
    uint64_t pairs = (uint64_t)h.batch_size * h.top_k;
    if (h.dtype != WIRE_BFLOAT16 || h.hidden_size != p.hidden || h.layer >= p.layers || pairs == 0 || pairs > p.pairs) {
        return REPLY_INVALID_ARGUMENT;
    }
    if (h.payload_length != scores_at(h) + 4 * pairs || h.payload_length > p.payload_capacity ||
        4ull * h.batch_size * h.hidden_size > p.result_capacity) {
        return REPLY_INTERNAL;
    }
    return h.budget_us == 0 ? REPLY_EXPIRED : REPLY_OK;
}

/* Claim a slot and copy its header. Returns whether it has a request. */
POLL bool take(const Persistent &p, word slot)
{
    Job &job = *p.job;
    word owner = claim(polled_at(p, slot));
    if (owner == 0) {
        return false;
    }
    job.slot = slot;
    job.owner = owner;
    const word *from = (const word *)request_at(p, slot);
    word copy[sizeof(RequestHeader) / sizeof(word)];
    for (word i = 0; i < sizeof copy / sizeof *copy; i++) {
        copy[i] = load_host(from + i);
    }
    memcpy(&job.header, copy, sizeof copy);
    job.status = status_of(p, job.header, owner);
    store_once(p.bad, 0);
    store_then_order(p.begun, load_host(p.begun) + 1);
    return true;
}

/* Poll the slots until one has a request or the host says stop. For a warp, of which each lane polls a slot, since a
 * read of the host's memory takes a microsecond. `at`: the slot to begin with.
 */
POLL void find(const Persistent &p, word &at)
{
    for (;;) {
        word over = warp_broadcast(load_acquire(p.stop));
        if (over) {
            p.job->over = 1;
            return;
        }
        for (word begin = 0; begin < p.count; begin += WARP) {
            word mine = begin + LANE, slot = (at + mine) % p.count;
            word first = warp_first(mine < p.count && load_acquire(polled_at(p, slot).flag) == POLL_WRITTEN);
            if (first == WARP) {
                continue;
            }
            slot = (at + begin + first) % p.count;
            at = (slot + 1) % p.count;
            if (warp_broadcast(LANE == 0 && take(p, slot))) {
                return;
            }
            break;
        }
        rest();
    }
}

/* Write the result's header and hand the slot to its client. */
POLL void reply(const Persistent &p)
{
    const Job &job = *p.job;
    const RequestHeader &request = job.header;
    word status = job.status;
    if (status == REPLY_OK && load_device(p.bad) != 0) {
        status = REPLY_STALE_PLACEMENT;
    }
    bool is_ok = status == REPLY_OK;
    ResultHeader answer = {};
    answer.magic = WIRE_MAGIC;
    answer.version = WIRE_VERSION;
    answer.status = (uint16_t)status;
    answer.generation = job.owner;
    answer.request_id = request.request_id;
    if (is_ok) {
        answer.rows = request.batch_size;
        answer.hidden_size = request.hidden_size;
        answer.length = 4ull * request.batch_size * request.hidden_size;
    }
    word copy[sizeof answer / sizeof(word)];
    memcpy(copy, &answer, sizeof answer);
    word *to = (word *)(request_at(p, job.slot) + p.request_bytes);
    for (word i = 0; i < sizeof copy / sizeof *copy; i++) {
        store_host(to + i, copy[i]);
    }
    store_release(p.ended, load_host(p.begun));
    finish(polled_at(p, job.slot));
}

/* ---- the steps ----------------------------------------------------------------------------------------- */

POLL void gather(const Persistent &p, const Job &job, word pairs)
{
    const RequestHeader &header = job.header;
    const uint8_t *payload = request_at(p, job.slot) + sizeof(RequestHeader);
    word all = BLOCKS * LANES, me = BLOCK * LANES + LANE;
    word columns = p.up_inputs / 2, given = p.hidden / 2;
    for (uint64_t i = me; i < (uint64_t)header.batch_size * columns; i += all) {
        uint64_t token = i / columns, column = i % columns;
        p.x[i] = column < given ? load_host((const word *)payload + token * given + column) : 0;
    }
    word padding = p.down_inputs - p.intermediate;
    for (uint64_t i = me; i < (uint64_t)pairs * padding; i += all) {
        p.h[i / padding * p.down_inputs + p.intermediate + i % padding] = 0;
    }
    for (word pair = me; pair < pairs; pair += all) {
        int32_t id = (int32_t)load_host((const word *)(payload + ids_at(header)) + pair);
        p.scores[pair] = from_bits(load_host((const word *)(payload + scores_at(header)) + pair));
        if (id != -1) {
            bool is_expert = id >= 0 && (word)id < p.experts;
            p.addresses[pair] = is_expert ? load_address(p.table + (uint64_t)header.layer * p.experts + id) : 0;
            if (p.addresses[pair] == 0) {
                store_once(p.bad, 1);
            }
        }
        p.ids[pair] = id;
    }
}

/* A pair's place is the number of pairs before it: few pairs, and no two lanes write the same word. */
POLL void sort(const Persistent &p, word pairs)
{
    for (word pair = BLOCK * LANES + LANE; pair < pairs; pair += BLOCKS * LANES) {
        int32_t id = p.ids[pair];
        word at = 0;
        for (word other = 0; other < pairs; other++) {
            int32_t its = p.ids[other];
            at += its < id || (its == id && other < pair);
        }
        p.order[at] = pair;
        p.order_ids[at] = id;
    }
}

POLL float bias_of(const uint8_t *block, uint64_t at, word channel)
{
    return ((const float *)(block + at))[channel];
}

POLL void up(const Persistent &p, word top_k, const uint8_t *block, word channel, word begin, word end)
{
    const word *matrix = (const word *)(block + p.up_at);
    uint64_t row_words = p.up_inputs / 2;
    const word *inputs[ROWS];
    UNROLL
    for (word row = 0; row < ROWS; row++) {
        word at = begin + row < end ? begin + row : end - 1;
        inputs[row] = p.x + p.order[at] / top_k * row_words;
    }
    const word *gate_row = matrix + channel * row_words, *up_row = gate_row + p.intermediate * row_words;
    Product gate = multiply(gate_row, inputs, p.up_inputs);
    Product up = p.activation.has_gate ? multiply(up_row, inputs, p.up_inputs) : Product();
    UNROLL
    for (word row = 0; row < ROWS; row++) {
        if (LANE % WARP == 0 && begin + row < end) {
            if (p.has_up_bias) {
                gate.sums[row] += bias_of(block, p.up_bias_at, channel);
                up.sums[row] += p.activation.has_gate ? bias_of(block, p.up_bias_at, channel + p.intermediate) : 0;
            }
            p.h[(uint64_t)(begin + row) * p.down_inputs + channel] =
                to_bfloat16(activate(gate.sums[row], up.sums[row], p.activation));
        }
    }
}

POLL void down(const Persistent &p, word, const uint8_t *block, word channel, word begin, word end)
{
    uint64_t row_words = p.down_inputs / 2;
    const word *inputs[ROWS];
    UNROLL
    for (word row = 0; row < ROWS; row++) {
        inputs[row] = (const word *)p.h + (begin + row < end ? begin + row : end - 1) * row_words;
    }
    Product product = multiply((const word *)(block + p.down_at) + channel * row_words, inputs, p.down_inputs);
    UNROLL
    for (word row = 0; row < ROWS; row++) {
        if (LANE % WARP == 0 && begin + row < end) {
            word pair = p.order[begin + row];
            float sum = product.sums[row] + (p.has_down_bias ? bias_of(block, p.down_bias_at, channel) : 0);
            /* Rounded, so that the sum of the terms is exact (slot.py). */
            p.y[(uint64_t)pair * p.hidden + channel] = from_bits((word)to_bfloat16(p.scores[pair] * sum) << 16);
        }
    }
}

typedef void Step(const Persistent &, word, const uint8_t *, word, word, word);

/* Divide the channels of all experts that have rows among the warps. */
template <Step *step> POLL void each_channel(const Persistent &p, word pairs, word top_k, word channels)
{
    word warps = BLOCKS * LANES / WARP, me = (BLOCK * LANES + LANE) / WARP;
    /* Channels of the experts before, modulo the warps. */
    word before = 0;
    for (word begin = 0, end; begin < pairs; begin = end) {
        int32_t id = p.order_ids[begin];
        for (end = begin + 1; end < pairs && p.order_ids[end] == id;) {
            end++;
        }
        if (id < 0) {
            continue;
        }
        const uint8_t *block = (const uint8_t *)p.addresses[p.order[begin]];
        for (word channel = (me + warps - before) % warps; channel < channels; channel += warps) {
            for (word row = begin; row < end; row += ROWS) {
                step(p, top_k, block, channel, row, end);
            }
        }
        before = (before + channels) % warps;
    }
}

POLL void combine(const Persistent &p, const Job &job)
{
    word top_k = job.header.top_k;
    word *result = (word *)(request_at(p, job.slot) + p.request_bytes + sizeof(ResultHeader));
    uint64_t values = (uint64_t)job.header.batch_size * p.hidden;
    for (uint64_t i = BLOCK * LANES + LANE; i < values; i += BLOCKS * LANES) {
        uint64_t token = i / p.hidden, column = i % p.hidden;
        float sum = 0;
        for (word k = 0; k < top_k; k++) {
            uint64_t pair = token * top_k + k;
            sum += p.ids[pair] < 0 ? 0 : p.y[pair * p.hidden + column];
        }
        store_host(result + i, to_bits(sum));
    }
    fence_host();
}

#ifdef __CUDACC_RTC__
extern "C" __global__ void __launch_bounds__(256, 1) serve(Persistent p)
#else
static void serve(const Persistent &p)
#endif
{
    word meetings = 0, at = 0;
    for (;;) {
        if (BLOCK == 0 && LANE < WARP) {
            find(p, at);
        }
        meet(p, meetings);
        const Job &job = *p.job;
        if (job.over) {
            return;
        }
        if (job.status == REPLY_OK) {
            word top_k = job.header.top_k, pairs = job.header.batch_size * top_k;
            gather(p, job, pairs);
            meet(p, meetings);
            /* All lanes see the same. */
            if (load_device(p.bad) == 0) {
                sort(p, pairs);
                meet(p, meetings);
                each_channel<up>(p, pairs, top_k, p.intermediate);
                meet(p, meetings);
                each_channel<down>(p, pairs, top_k, p.hidden);
                meet(p, meetings);
                combine(p, job);
            }
        }
        meet(p, meetings);
        if (BLOCK == 0 && LANE == 0) {
            reply(p);
        }
    }
}
