// The persistent kernel (persistent.cu) on threads, one for each lane.
//
// As a library: `serve_on_threads` runs it on memory of the caller, until the caller stops it.
// As a program: persistent_threads EXCHANGES SECONDS
//
// has clients, of which some are lost, and a loader that swaps experts while they are used; with ThreadSanitizer, which
// checks the memory. It prints the numbers of answers, refused requests, losses, swaps and errors; exits with 1 after
// an error.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include <sched.h>

#include "expert_server/kernels/gpu/persistent.cu"

namespace {

// All lanes of a block.
struct Block {
    word arrived = 0, passed = 0;
};

thread_local Block *block_of_this;

} // namespace

static void sync_block()
{
    Block &block = *block_of_this;
    word passed = __atomic_load_n(&block.passed, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&block.arrived, 1, __ATOMIC_ACQ_REL) == LANES) {
        __atomic_store_n(&block.arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&block.passed, passed + 1, __ATOMIC_RELEASE);
    } else {
        while (__atomic_load_n(&block.passed, __ATOMIC_ACQUIRE) == passed) {
            sched_yield();
        }
    }
}

static void rest()
{
    sched_yield();
}

extern "C" unsigned arguments_bytes()
{
    return sizeof(Persistent);
}

extern "C" unsigned job_bytes()
{
    return sizeof(Job);
}

extern "C" void serve_on_threads(const Persistent *p, unsigned blocks, unsigned lanes)
{
    std::vector<Block> all(blocks);
    std::vector<std::thread> threads;
    for (unsigned block = 0; block < blocks; block++) {
        for (unsigned lane = 0; lane < lanes; lane++) {
            threads.emplace_back([=, &all] {
                block_of_this = &all[block];
                place = {lane, lanes, block, blocks};
                serve(*p);
            });
        }
    }
    for (std::thread &each : threads) {
        each.join();
    }
}

#ifdef AS_PROGRAM

namespace {

constexpr word SLOTS = 3, EXPERTS = 3, HIDDEN = 64, INNER = 64, TOP_K = 2, TOKENS = 2, PAIRS = TOKENS * TOP_K;
constexpr word REQUEST_BYTES = 128 + 256 + 64 + 64, RESULT_BYTES = 64 + 4 * TOKENS * HIDDEN;
constexpr word BLOCKS_HERE = 2, LANES_HERE = 2;

using Clock = std::chrono::steady_clock;

alignas(64) uint8_t slots[SLOTS * (REQUEST_BYTES + RESULT_BYTES)];
word flags[SLOTS * LINE_WORDS], busy[SLOTS * LINE_WORDS], generations[SLOTS * LINE_WORDS], begun, ended, stop;
uint64_t table[EXPERTS];
// Each expert's up is the identity and its down a multiple of it; two blocks for each, of which one is in use.
alignas(16) uint16_t blocks[EXPERTS][2][2 * HIDDEN * INNER];
Job job;
word arrived, bad, x[PAIRS * INNER / 2], order[PAIRS];
int32_t ids[PAIRS], order_ids[PAIRS];
uint64_t addresses[PAIRS];
float scores[PAIRS], y[PAIRS * HIDDEN];
alignas(16) uint16_t h[PAIRS * INNER];
std::atomic<unsigned long> answers{0}, refused{0}, losses{0}, swaps{0}, wrong{0};
std::atomic<bool> over{false};

void fill(word expert, word which, bool is_poisoned)
{
    for (word matrix = 0; matrix < 2; matrix++) {
        for (word i = 0; i < HIDDEN * INNER; i++) {
            float value = i / INNER != i % INNER ? 0.0f : matrix == 0 ? 1.0f : 1.0f + expert;
            blocks[expert][which][matrix * HIDDEN * INNER + i] = to_bfloat16(is_poisoned ? NAN : value);
        }
    }
}

// Unload an expert, spoil its memory, and load it elsewhere: a device that still read it would be a race.
void swap_experts()
{
    word which[EXPERTS] = {};
    for (unsigned turn = 0; !over; turn++) {
        word expert = turn % EXPERTS;
        __atomic_store_n(&table[expert], 0, __ATOMIC_SEQ_CST);
#ifndef FREE_AT_ONCE
        word now = __atomic_load_n(&begun, __ATOMIC_SEQ_CST);
        while ((int32_t)(__atomic_load_n(&ended, __ATOMIC_ACQUIRE) - now) < 0) {
            sched_yield();
        }
#endif
        fill(expert, which[expert], true);
        which[expert] = 1 - which[expert];
        fill(expert, which[expert], false);
        __atomic_store_n(&table[expert], (uint64_t)blocks[expert][which[expert]], __ATOMIC_RELEASE);
        swaps++;
        for (int i = 0; i < 200 && !over; i++) {
            sched_yield();
        }
    }
}

bool exchange_if(word *at, word was, word is)
{
    return __atomic_compare_exchange_n(at, &was, is, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

void ask(word slot, unsigned long exchanges, Clock::time_point deadline)
{
    PolledSlot polled = {flags + slot * LINE_WORDS, busy + slot * LINE_WORDS, generations + slot * LINE_WORDS};
    uint8_t *request = slots + slot * (REQUEST_BYTES + RESULT_BYTES);
    ResultHeader answer;
    word generation = 1;
    unsigned dice = 1 + slot;
    grant(polled, generation);
    for (unsigned long number = 1; number <= exchanges && Clock::now() < deadline; number++) {
        word tokens = 1 + number % TOKENS;
        RequestHeader header = {};
        header.magic = WIRE_MAGIC;
        header.version = WIRE_VERSION;
        header.dtype = WIRE_BFLOAT16;
        header.generation = generation;
        header.request_id = number;
        header.budget_us = 1000;
        header.batch_size = tokens;
        header.hidden_size = HIDDEN;
        header.top_k = TOP_K;
        header.payload_length = scores_at(header) + 4 * tokens * TOP_K;
        memcpy(request, &header, sizeof header);
        uint8_t *payload = request + sizeof header;
        float right[TOKENS] = {};
        for (word token = 0; token < tokens; token++) {
            float value = 1 + (number + token) % 8;
            for (word i = 0; i < HIDDEN; i++) {
                ((uint16_t *)payload)[token * HIDDEN + i] = to_bfloat16(value);
            }
            for (word k = 0; k < TOP_K; k++) {
                int32_t id = (int32_t)(rand_r(&dice) % (EXPERTS + 1)) - 1;
                float score = 0.5f * (1 + k);
                ((int32_t *)(payload + ids_at(header)))[token * TOP_K + k] = id;
                ((float *)(payload + scores_at(header)))[token * TOP_K + k] = score;
                right[token] += id < 0 ? 0 : score * value * (1 + id);
            }
        }
        if (!exchange_if(polled.flag, POLL_FREE, POLL_WRITTEN)) {
            wrong++;
        }
        bool is_lost = rand_r(&dice) % 8 == 0;
        int patience = is_lost ? rand_r(&dice) % 64 : -1;
        while (load_acquire(polled.flag) != POLL_DONE && patience-- != 0) {
            sched_yield();
        }
        if (is_lost) {
            revoke(polled);
            while (!grant(polled, ++generation)) {
                generation--;
                sched_yield();
            }
            losses++;
            continue;
        }
        memcpy(&answer, request + REQUEST_BYTES, sizeof answer);
        bool is_right = answer.magic == WIRE_MAGIC && answer.generation == generation && answer.request_id == number;
        if (answer.status == REPLY_STALE_PLACEMENT) {
            refused++;
        } else {
            is_right = is_right && answer.status == REPLY_OK && answer.rows == tokens;
            const float *result = (const float *)(request + REQUEST_BYTES + sizeof answer);
            for (word i = 0; i < tokens * HIDDEN; i++) {
                is_right = is_right && result[i] == right[i / HIDDEN];
            }
            answers++;
        }
        if (!is_right || !exchange_if(polled.flag, POLL_DONE, POLL_FREE)) {
            wrong++;
        }
    }
}

} // namespace

int main(int, char **arguments)
{
    unsigned long exchanges = strtoul(arguments[1], nullptr, 10) / SLOTS;
    Clock::time_point deadline = Clock::now() + std::chrono::seconds(strtoul(arguments[2], nullptr, 10));
    for (word expert = 0; expert < EXPERTS; expert++) {
        fill(expert, 0, false);
        table[expert] = (uint64_t)blocks[expert][0];
    }
    Persistent p = {};
    p.slots = slots;
    p.request_bytes = REQUEST_BYTES;
    p.slot_bytes = REQUEST_BYTES + RESULT_BYTES;
    p.flags = flags;
    p.busy = busy;
    p.generations = generations;
    p.table = table;
    p.begun = &begun;
    p.ended = &ended;
    p.stop = &stop;
    p.payload_capacity = REQUEST_BYTES - 128;
    p.result_capacity = RESULT_BYTES - 64;
    p.count = SLOTS;
    p.hidden = p.intermediate = HIDDEN;
    p.layers = 1;
    p.experts = EXPERTS;
    p.pairs = PAIRS;
    p.up_inputs = p.down_inputs = INNER;
    p.activation.kind = ACT_RELU;
    p.down_at = 2 * HIDDEN * INNER;
    p.job = &job;
    p.arrived = &arrived;
    p.bad = &bad;
    p.x = x;
    p.ids = ids;
    p.addresses = addresses;
    p.scores = scores;
    p.order = order;
    p.order_ids = order_ids;
    p.h = h;
    p.y = y;
    std::thread device(serve_on_threads, &p, BLOCKS_HERE, LANES_HERE), loader(swap_experts);
    std::vector<std::thread> clients;
    for (word slot = 0; slot < SLOTS; slot++) {
        clients.emplace_back(ask, slot, exchanges, deadline);
    }
    for (std::thread &each : clients) {
        each.join();
    }
    over = true;
    loader.join();
    store_release(&stop, 1);
    device.join();
    printf("%lu %lu %lu %lu %lu\n", answers.load(), refused.load(), losses.load(), swaps.load(), wrong.load());
    return wrong != 0;
}

#endif
