"""No wake-up is lost: ping-pong between processes and threads, with a sleep at nearly every turn.

A lost wake-up does not hang, because a sleeper checks every 250 ms. So the tests count the turns that took
that long: a busy machine causes a few, lost wake-ups cause many.
"""

import os
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import eaas
from eaas.wire import Arena, SlotState
from eaas.wire.slot import DOORBELL, REQUEST_HEADER_BYTES, RESULT_HEADER_BYTES, reply_doorbell

ROOT = Path(eaas.__file__).parents[1]
TURN_TIMEOUT_US = 10_000_000
RESCUED_NS = 240_000_000
NUMBER = struct.Struct("<Q")

ECHO_SERVER = """
import sys
from eaas.wire import Arena, SlotState
from eaas.wire.slot import DOORBELL, REQUEST_HEADER_BYTES, RESULT_HEADER_BYTES, reply_doorbell

pid, fd, size, turns, spin_us = map(int, sys.argv[1:])
arena = Arena.attach(pid, fd, size)
asked = arena.request_offset(0) + REQUEST_HEADER_BYTES
answered = arena.result_offset(0) + RESULT_HEADER_BYTES
print("ready", flush=True)
for _ in range(turns):
    assert arena.flags.wait(0, 1, SlotState.WRITTEN.mask, DOORBELL, -1, spin_us, 10_000_000) == [0]
    arena.buffer[answered : answered + 8] = arena.buffer[asked : asked + 8]
    assert arena.server_done(0)
    arena.flags.ring(reply_doorbell(0))
"""

COUNTER = """
import struct, sys
from eaas.wire import Arena, SlotState

open_, locked = SlotState.FREE, SlotState.WRITTEN
pid, fd, size, turns = map(int, sys.argv[1:])
arena = Arena.attach(pid, fd, size)
number, offset, flags = struct.Struct("<Q"), arena.request_offset(0), arena.flags
print("ready", flush=True)
assert flags.wait(1, 1, locked.mask, 0, -1, -1, 60_000_000) == [1]
for _ in range(turns):
    while not flags.compare_exchange(0, open_, locked):
        pass
    number.pack_into(arena.buffer, offset, number.unpack_from(arena.buffer, offset)[0] + 1)
    assert flags.exchange(0, open_) == locked
"""


def ask(arena: Arena, slot: int, doorbell: int, number: int, spin_us: int) -> int:
    """One turn of a client, which checks the answer; returns its nanoseconds."""
    start = time.monotonic_ns()
    NUMBER.pack_into(arena.buffer, arena.request_offset(slot) + REQUEST_HEADER_BYTES, number)
    assert arena.client_write_done(slot)
    arena.flags.ring(DOORBELL)
    done = SlotState.DONE.mask
    assert arena.flags.wait(slot, 1, done, doorbell, -1, spin_us, TURN_TIMEOUT_US) == [slot]
    answer = NUMBER.unpack_from(arena.buffer, arena.result_offset(slot) + RESULT_HEADER_BYTES)
    assert answer == (number,)
    assert arena.client_free(slot)
    return time.monotonic_ns() - start


@pytest.mark.parametrize("spin_us", [0, 20])
def test_two_processes_lose_no_wake_up(spin_us: int) -> None:
    """Data written before a flag is visible after it, in both directions."""
    turns = 20_000
    arena = Arena.create_shared(1, 64, 64, 1)
    arguments = [str(n) for n in (os.getpid(), arena.fd, arena.size, turns, spin_us)]
    command = [sys.executable, "-c", ECHO_SERVER, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            times_ns = [ask(arena, 0, reply_doorbell(0), turn, spin_us) for turn in range(turns)]
            assert server.wait(30) == 0
        finally:
            server.kill()
            arena.close()
    assert sum(t >= RESCUED_NS for t in times_ns) <= turns // 1000


@pytest.mark.parametrize("spin_us", [0, 20])
def test_many_threads_on_one_doorbell_lose_no_wake_up(spin_us: int) -> None:
    """Each reply also wakes waiters of other slots, which sleep again."""
    clients, turns = 4, 2_000
    arena = Arena.create_local(clients, 64, 64, 1)
    doorbell = reply_doorbell(0)

    def client(slot: int) -> list[int]:
        return [ask(arena, slot, doorbell, turn, spin_us) for turn in range(turns)]

    def server() -> None:
        written = SlotState.WRITTEN.mask
        left = clients * turns
        while left:
            ready = arena.flags.wait(0, clients, written, DOORBELL, -1, spin_us, TURN_TIMEOUT_US)
            assert ready
            for slot in ready:
                asked = arena.request_offset(slot) + REQUEST_HEADER_BYTES
                answered = arena.result_offset(slot) + RESULT_HEADER_BYTES
                arena.buffer[answered : answered + 8] = arena.buffer[asked : asked + 8]
                arena.server_done(slot)
                arena.flags.ring(doorbell)
            left -= len(ready)

    with ThreadPoolExecutor(clients + 1) as pool:
        serving = pool.submit(server)
        times_ns = [t for times in pool.map(client, range(clients)) for t in times]
        serving.result()
    arena.close()
    assert sum(t >= RESCUED_NS for t in times_ns) <= clients * turns // 1000


def test_compare_exchange_has_one_winner() -> None:
    """Two processes use flag 0 as a lock for a counter that is not atomic."""
    turns = 100_000
    arena = Arena.create_shared(2, 64, 64, 1)
    arguments = [str(n) for n in (os.getpid(), arena.fd, arena.size, turns)]
    command = [sys.executable, "-c", COUNTER, *arguments]
    with (
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as one,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as other,
    ):
        try:
            for process in (one, other):
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
            arena.flags.exchange(1, SlotState.WRITTEN)  # Both spin for it: they start at once.
            assert [process.wait(60) for process in (one, other)] == [0, 0]
            assert NUMBER.unpack_from(arena.buffer, arena.request_offset(0)) == (2 * turns,)
        finally:
            one.kill()
            other.kill()
            arena.close()


@pytest.mark.parametrize("spin_us", [0, -1])
def test_an_interrupt_between_check_and_wait_is_seen(spin_us: int) -> None:
    """seq, check, wait: an interrupt after the check ends the wait."""
    arena = Arena.create_local(1, 64, 64, 1)
    flags = arena.flags
    rounds = 500
    requested = 0
    done = threading.Event()

    def waiter() -> int:
        served, rescued = 0, 0
        while served < rounds:
            seen = flags.seq(DOORBELL)
            if requested > served:
                served = requested
                done.set()
                continue
            start = time.monotonic_ns()
            flags.wait(0, 1, SlotState.WRITTEN.mask, DOORBELL, seen, spin_us, TURN_TIMEOUT_US)
            rescued += time.monotonic_ns() - start >= RESCUED_NS
        return rescued

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(waiter)
        for _ in range(rounds):
            done.clear()
            requested += 1
            flags.interrupt(DOORBELL)
            assert done.wait(30)
        assert waiting.result() <= rounds // 100
    arena.close()
