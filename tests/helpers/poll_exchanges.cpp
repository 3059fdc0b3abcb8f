// The polling protocol (poll.h) on threads: a device of two blocks, and for each slot a thread that is its client and,
// when the client is lost, the host. It checks every answer; ThreadSanitizer checks the memory.
//
//     poll_exchanges EXCHANGES SECONDS
//
// prints the numbers of answers, losses, dropped answers and errors; exits with 1 after an error. It ends after so many
// seconds at the latest.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include <sched.h>

#include "expert_server/kernels/gpu/poll.h"

namespace {

constexpr word SLOTS = 4, BLOCKS = 2, VALUES = 8, LINE = 16;

struct Request {
    word generation, number, values[VALUES];
};

word flags[SLOTS * LINE], busy[SLOTS * LINE], generations[SLOTS * LINE], over;
Request requests[SLOTS], results[SLOTS];
std::atomic<unsigned long> answers{0}, losses{0}, dropped{0}, wrong{0};

bool exchange_if(word *at, word was, word is)
{
    return __atomic_compare_exchange_n(at, &was, is, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

PolledSlot slot_at(word at)
{
    return {&flags[at * LINE], &busy[at * LINE], &generations[at * LINE]};
}

void serve(word block)
{
    while (load_acquire(&over) == 0) {
        bool rests = true;
        for (word at = block; at < SLOTS; at += BLOCKS) {
            PolledSlot slot = slot_at(at);
            word owner = claim(slot);
            if (owner == 0) {
                continue;
            }
            rests = false;
            const Request &request = requests[at];
            if (request.generation != owner) {
                wrong++;
            }
            Request &result = results[at];
            result.generation = request.generation;
            result.number = request.number;
            for (word i = 0; i < VALUES; i++) {
                result.values[i] = 2 * request.values[i];
            }
            if (request.number % 4 == 1) {
                // So that some owners are lost meanwhile.
                sched_yield();
            }
            if (!finish(slot)) {
                dropped++;
            }
        }
        if (rests) {
            sched_yield();
        }
    }
}

void lose(const PolledSlot &slot, word &generation)
{
    revoke(slot);
    generation++;
#ifdef GRANT_WHILE_BUSY
    store_then_order(slot.generation, generation);
    store_release(slot.flag, POLL_FREE);
#else
    while (!grant(slot, generation)) {
        sched_yield();
    }
#endif
    losses++;
}

using Clock = std::chrono::steady_clock;

void ask(word at, unsigned long exchanges, Clock::time_point deadline)
{
    PolledSlot slot = slot_at(at);
    word generation = 1;
    unsigned dice = 1 + at;
    grant(slot, generation);
    for (word number = 0; number < exchanges && Clock::now() < deadline; number++) {
        Request &request = requests[at];
        request.generation = generation;
        request.number = number;
        for (word i = 0; i < VALUES; i++) {
            request.values[i] = number + i;
        }
        int roll = rand_r(&dice) % 8;
        if (roll == 0) {
            // Lost before the request is visible.
            lose(slot, generation);
            continue;
        }
        if (!exchange_if(slot.flag, POLL_FREE, POLL_WRITTEN)) {
            wrong++;
        }
        for (int patience = roll == 1 ? rand_r(&dice) % 64 : -1; load_acquire(slot.flag) != POLL_DONE;) {
            if (patience-- == 0) {
                break;
            }
            sched_yield();
        }
        if (roll == 1) {
            // Lost with a request that waits, is computed, or is answered.
            lose(slot, generation);
            continue;
        }
        const Request &result = results[at];
        bool is_right = result.generation == generation && result.number == number;
        for (word i = 0; i < VALUES; i++) {
            is_right = is_right && result.values[i] == 2 * (number + i);
        }
        answers++;
        if (!is_right) {
            wrong++;
        }
        if (!exchange_if(slot.flag, POLL_DONE, POLL_FREE)) {
            wrong++;
        }
    }
}

} // namespace

int main(int, char **arguments)
{
    unsigned long exchanges = strtoul(arguments[1], nullptr, 10) / SLOTS;
    Clock::time_point deadline = Clock::now() + std::chrono::seconds(strtoul(arguments[2], nullptr, 10));
    std::vector<std::thread> device, clients;
    for (word block = 0; block < BLOCKS; block++) {
        device.emplace_back(serve, block);
    }
    for (word at = 0; at < SLOTS; at++) {
        clients.emplace_back(ask, at, exchanges, deadline);
    }
    for (std::thread &each : clients) {
        each.join();
    }
    store_release(&over, 1);
    for (std::thread &each : device) {
        each.join();
    }
    printf("%lu %lu %lu %lu\n", answers.load(), losses.load(), dropped.load(), wrong.load());
    return wrong != 0;
}
