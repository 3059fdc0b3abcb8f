"""A load waits for the end of a batch, but not for ever."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_server.experts.load_throttling import LoadThrottle


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
def test_no_piece_begins_during_a_batch_without_a_pause(
    seconds: list[float], edges: list[float]
) -> None:
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
