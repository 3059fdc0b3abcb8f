"""`python -m benchmarks.dispatch`: its arithmetic and its floor, in which the right bytes arrive."""

import mmap
import os
import threading
from array import array
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.dispatch import parts
from benchmarks.dispatch.floor import Floor, shared_bytes
from benchmarks.dispatch.rows import Round, row_of
from benchmarks.harness import _floor
from benchmarks.harness.ratios import Turn
from benchmarks.harness.worker import Worker, working
from eaas.cores import usable_cores
from eaas.errors import ClusterError
from eaas_cli.bench.experts.plan import Shape


def test_differences_and_ratios_are_the_rounds_own() -> None:
    rounds = [
        Round(Turn(floor, floor, 20), Turn(call, call, 20))
        for floor, call in ((1, 100), (2, 50), (40, 120))
    ]
    row = row_of("shm", 64, 1, (328, 320), rounds)
    assert row["layer_call_us"] == {"p50": 100, "p99": 100}
    assert row["floor_us"] == {"p50": 2, "p99": 2}
    assert row["over_floor_us"] == 80  # of 99, 48, 80; and not 100 - 2
    assert row["times_floor"] == 25  # of 100, 25, 3; and not 100 / 2
    assert (row["rounds"], row["calls"]) == (3, 60)


def test_the_layer_needs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "free_bytes", lambda: 3 << 30)
    lack = parts.lack_of_memory(Shape(2048, 768, 128, 8))
    assert "needs 3.5 GB of memory, and 3.2 GB are free" in lack
    assert parts.lack_of_memory(Shape(64, 32, 4, 2)) == ""


def test_a_child_that_fails_is_quoted() -> None:
    start = partial(Worker, "broken", "benchmarks.harness.lone_server")
    with pytest.raises(ClusterError, match=r"broken ended .* KeyError: 'shape'"), working([start]):
        pass


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
def test_what_does_not_fit_is_refused(request_bytes, result_bytes, room, core) -> None:
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
