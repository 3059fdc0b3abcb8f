"""A load waits for the end of a batch, but not for ever, in threads of low priority."""

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from expert_server.experts.load_throttling import LoadThrottle
from expert_server.weights.background import compute_alone, step_back


class World:
    """Batches, and a clock that moves while the loader pauses or works.

    Args:
        busy: (begin, end) of each batch.
    """

    def __init__(self, busy: list[tuple[float, float]]) -> None:
        self.busy = busy
        self.now = 0.0
        self.worked = 0.0
        self.throttle = LoadThrottle(self, lambda: self.now, lambda: self.worked, self.sleep)

    @property
    def is_busy(self) -> bool:
        return any(begin <= self.now < end for begin, end in self.busy)

    def wait_idle(self, timeout_s: float) -> None:
        ends = [end for begin, end in self.busy if begin <= self.now < end]
        self.now = min(self.now + timeout_s, *ends)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def pieces(self, seconds: list[float]) -> list[tuple[float, float]]:
        """Work on pieces of these lengths; returns the begin and end of each."""
        done = []
        for piece_s in seconds:
            self.throttle.wait()
            began = self.now
            self.now += piece_s
            self.worked += piece_s
            done.append((began, self.now))
        return done


class Busy:
    """A server that is always busy, by the real clock."""

    is_busy = True

    def wait_idle(self, timeout_s: float) -> None:
        time.sleep(timeout_s)


piece_s = st.floats(1e-4, 1e-2)


@given(seconds=st.lists(piece_s, min_size=2, max_size=40))
def test_an_always_busy_server_still_loads(seconds: list[float]) -> None:
    done = World([(0.0, 1e9)]).pieces(seconds)
    for (began, ended), (next_began, _) in pairwise(done):
        assert next_began - ended == pytest.approx(10 * (ended - began))


@given(
    seconds=st.lists(piece_s, min_size=2, max_size=40),
    edges=st.lists(st.floats(0, 1), max_size=20, unique=True),
)
def test_no_piece_begins_during_a_batch_without_a_pause(seconds, edges) -> None:
    edges.sort()
    world = World(list(zip(edges[::2], edges[1::2], strict=False)))
    done = world.pieces(seconds)
    for (began, ended), (next_began, _) in pairwise(done):
        during = any(begin <= next_began < end for begin, end in world.busy)
        assert not during or next_began - ended >= 10 * (ended - began) - 1e-9


@given(seconds=st.lists(piece_s, min_size=2, max_size=40))
def test_an_idle_server_loads_without_pauses(seconds: list[float]) -> None:
    world = World([])
    world.pieces(seconds)
    assert world.now == pytest.approx(sum(seconds))


def test_the_end_of_a_batch_shortens_the_pause() -> None:
    world = World([(0.25, 0.375)])
    assert [began for began, _ in world.pieces([0.25, 0.75, 0.25])] == [0.0, 0.5, 1.25]


def test_waiting_for_a_disk_needs_no_pause() -> None:
    throttle = LoadThrottle(Busy())
    throttle.wait()
    time.sleep(0.5)
    began = time.monotonic()
    throttle.wait()
    # A pause for the time asleep would take 5 s.
    assert time.monotonic() - began < 4.0


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.parametrize("begin", [step_back, compute_alone])
def test_only_the_thread_itself_has_low_priority(begin: Callable[[], None]) -> None:
    before = niceness()
    with ThreadPoolExecutor(1, initializer=begin) as thread:
        assert thread.submit(niceness).result() == min(19, before + 10)
        with ThreadPoolExecutor(1, initializer=begin) as nested:
            assert nested.submit(niceness).result() <= 19
    assert niceness() == before
    with ThreadPoolExecutor(1) as another:
        assert another.submit(niceness).result() == before


def test_torch_computes_with_one_thread_there_and_with_all_elsewhere() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(1, initializer=compute_alone) as thread:
            assert thread.submit(torch.get_num_threads).result() == 1
        with ThreadPoolExecutor(1) as another:
            assert another.submit(torch.get_num_threads).result() == 2
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
