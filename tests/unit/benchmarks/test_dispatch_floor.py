"""The floor of `python -m benchmarks.dispatch`: the right bytes arrive, and the two sides end."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.dispatch.floor import Floor, mapping_bytes
from benchmarks.harness import _floor
from eaas.cores import usable_cores

HEADER = 64
WRITTEN, DONE = 1, 2
PATIENCE_MS = 20_000
MOST = 5000


def memory(request_bytes: int, result_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, mapping_bytes(request_bytes, result_bytes))


def call(
    mapping: mmap.mmap,
    source: bytes,
    result_bytes: int,
    rounds: int = 1,
    check: bool = True,
    timeout_ms: int = PATIENCE_MS,
) -> tuple[bytes, list[int]]:
    destination, took = bytearray(result_bytes), array("Q", bytes(8 * rounds))
    _floor.call(mapping, source, destination, took, timeout_ms, check)
    return bytes(destination), list(took)


@contextmanager
def serving(mapping: mmap.mmap, source: bytes) -> Iterator[list[Exception]]:
    """The other side in a thread; yields what it raised."""
    errors: list[Exception] = []

    def serve() -> None:
        try:
            _floor.serve(mapping, source)
        except ValueError as error:
            errors.append(error)

    server = threading.Thread(target=serve)
    server.start()
    try:
        yield errors
    finally:
        _floor.stop(mapping)
        server.join(PATIENCE_MS / 1e3)
        assert not server.is_alive()


@contextmanager
def answering(mapping: mmap.mmap, answer: Callable[[], None]) -> Iterator[None]:
    """A server of our own, for one round trip: `answer` writes the result."""

    def serve() -> None:
        while mapping[0] != WRITTEN:
            time.sleep(0.001)
        answer()
        mapping[0] = DONE

    server = threading.Thread(target=serve)
    server.start()
    yield
    server.join()


@settings(max_examples=30, deadline=None)
@given(st.integers(HEADER, MOST), st.integers(HEADER, MOST), st.integers(1, 50))
def test_the_right_bytes_arrive(request_bytes: int, result_bytes: int, rounds: int) -> None:
    mapping = memory(request_bytes, result_bytes)
    source, result = os.urandom(request_bytes), os.urandom(MOST)
    with serving(mapping, result):
        destination, took = call(mapping, source, result_bytes, rounds)
    assert destination[HEADER:] == result[HEADER:result_bytes]
    assert mapping[64 + HEADER : 64 + request_bytes] == source[HEADER:]
    assert len(took) == rounds
    assert min(took) > 0


def test_other_bytes_are_found_on_demand() -> None:
    # Header and payload of a request, then of a result; the answer's round is right, its digests are not.
    def answer() -> None:
        struct.pack_into("<Q", mapping, 64 + 128, 1)

    for check in (False, True):
        mapping = memory(128, 128)
        with answering(mapping, answer):
            if check:
                with pytest.raises(RuntimeError, match="other bytes arrived"):
                    call(mapping, bytes(128), 128, check=True)
            else:
                call(mapping, bytes(128), 128, check=False)


def test_what_does_not_fit_is_refused() -> None:
    mapping = memory(HEADER, HEADER)
    for source, result in ((4096, HEADER), (HEADER, 4096), (HEADER - 1, HEADER), (HEADER, 8)):
        with pytest.raises(ValueError, match="does not hold this request"):
            call(mapping, bytes(source), result)
    with pytest.raises(ValueError, match="too small"):
        _floor.stop(bytearray(8))


@pytest.mark.skipif(usable_cores() < 2, reason="the two sides have a core each")
def test_between_two_processes() -> None:
    cores = os.sched_getaffinity(0)
    first, second = sorted(cores)[:2]
    with Floor(MOST, 2 * MOST, (first, second)) as floor:
        (child,) = psutil.Process().children()
        assert os.sched_getaffinity(child.pid) == {second}
        for sizes in ((MOST, 2 * MOST), (HEADER, HEADER), (1000, MOST)):
            turn = floor.turn(*sizes, seconds=0.005)
            assert turn.calls >= 20
            assert 0 < turn.p50_us <= turn.p99_us
        assert os.sched_getaffinity(0) == cores
    assert not child.is_running()
