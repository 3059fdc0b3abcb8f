"""The floor of `python -m benchmarks.dispatch`: the right bytes arrive, and the other side ends."""

from __future__ import annotations

import mmap
import os
import threading
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.dispatch.floor import Floor, shared_bytes
from benchmarks.harness import _floor
from eaas.cores import usable_cores

MOST = 5000
CORES = sorted(os.sched_getaffinity(0))


@settings(max_examples=30)
@given(st.integers(0, MOST), st.integers(0, MOST), st.integers(1, 50))
def test_the_right_bytes_arrive(request_bytes: int, result_bytes: int, rounds: int) -> None:
    shared = mmap.mmap(-1, shared_bytes(request_bytes, result_bytes))
    source, answer = os.urandom(request_bytes), os.urandom(result_bytes)
    destination, took = bytearray(result_bytes), array("Q", bytes(8 * rounds))
    done = _floor.round_trips(shared, source, answer, destination, took, CORES[-1], 10**12)
    assert done == rounds
    assert destination == answer
    assert shared[64 : 64 + request_bytes] == source
    assert all(took)


@pytest.mark.parametrize(
    ("request_bytes", "result_bytes", "room", "core"),
    [(4096, 64, 64, 0), (64, 4096, 4096, 0), (64, 64, 63, 0), (64, 64, 64, -1)],
)
def test_what_does_not_fit_is_refused(
    request_bytes: int, result_bytes: int, room: int, core: int
) -> None:
    shared, took = mmap.mmap(-1, shared_bytes(64, 64)), array("Q", bytes(8))
    with pytest.raises(ValueError, match="do not hold this request"):
        _floor.round_trips(
            shared, bytes(request_bytes), bytes(result_bytes), bytearray(room), took, core, 0
        )


def test_a_core_that_this_process_may_not_use_is_refused() -> None:
    shared = mmap.mmap(-1, shared_bytes(64, 64))
    with pytest.raises(OSError, match="Invalid argument"):
        _floor.round_trips(
            shared, bytes(64), bytes(64), bytearray(64), array("Q", bytes(8)), 1023, 0
        )


def test_a_turn_ends_in_time_with_twenty_round_trips_at_least() -> None:
    shared, took = mmap.mmap(-1, shared_bytes(64, 64)), array("Q", bytes(8 * 1000))
    assert _floor.round_trips(shared, bytes(64), bytes(64), bytearray(64), took, CORES[-1], 0) == 20
    assert all(took[:20])
    assert not any(took[20:])


@pytest.mark.skipif(usable_cores() < 2, reason="the two sides have a core each")
def test_turns_of_several_sizes() -> None:
    threads = threading.active_count(), len(os.listdir("/proc/self/task"))
    floor = Floor(MOST, 2 * MOST, (CORES[0], CORES[1]))
    for sizes in ((MOST, 2 * MOST), (64, 64), (1000, MOST)):
        turn = floor.turn(*sizes, seconds=0.005)
        assert turn.calls >= 20
        assert 0 < turn.p50_us <= turn.p99_us
    assert os.sched_getaffinity(0) == set(CORES)
    assert (threading.active_count(), len(os.listdir("/proc/self/task"))) == threads
