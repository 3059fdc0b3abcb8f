"""Whoever loads waits for a gap, but not for ever."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expert_server.gaps import Gaps, Turns


class World:
    """Batches, and a clock that moves while the loader rests or works.

    Args:
        busy: When there is work: (begin, end) each.
    """

    def __init__(self, busy: list[tuple[float, float]]) -> None:
        self.busy = busy
        self.now = 0.0
        self.worked = 0.0
        self.gaps = Gaps(self, lambda: self.now, lambda: self.worked, self.sleep)

    @property
    def is_busy(self) -> bool:
        return any(begin <= self.now < end for begin, end in self.busy)

    def wait_idle(self, timeout_s: float) -> None:
        ends = [end for begin, end in self.busy if begin <= self.now < end]
        self.now = min(self.now + timeout_s, *ends)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def pieces(self, seconds: list[float]) -> list[tuple[float, float]]:
        """Works on pieces that take so long; says when each began and ended."""
        done = []
        for piece_s in seconds:
            self.gaps.wait()
            began = self.now
            self.now += piece_s
            self.worked += piece_s
            done.append((began, self.now))
        return done


class Busy:
    """A server without a gap, by the real clock."""

    is_busy = True

    def wait_idle(self, timeout_s: float) -> None:
        time.sleep(timeout_s)


piece_s = st.floats(1e-4, 1e-2)


@given(seconds=st.lists(piece_s, min_size=2, max_size=40))
def test_a_server_without_a_gap_is_loaded_all_the_same(seconds: list[float]) -> None:
    done = World([(0.0, 1e9)]).pieces(seconds)
    for (began, ended), (next_began, _) in pairwise(done):
        assert next_began - ended == pytest.approx(10 * (ended - began))


@given(
    seconds=st.lists(piece_s, min_size=2, max_size=40),
    edges=st.lists(st.floats(0, 1), max_size=20, unique=True),
)
def test_no_piece_begins_beside_work_unless_it_rested(
    seconds: list[float], edges: list[float]
) -> None:
    edges.sort()
    world = World(list(zip(edges[::2], edges[1::2], strict=False)))
    done = world.pieces(seconds)
    for (began, ended), (next_began, _) in pairwise(done):
        beside = any(begin <= next_began < end for begin, end in world.busy)
        assert not beside or next_began - ended >= 10 * (ended - began) - 1e-9


@given(seconds=st.lists(piece_s, min_size=2, max_size=40))
def test_where_there_is_no_work_nothing_is_waited(seconds: list[float]) -> None:
    world = World([])
    world.pieces(seconds)
    assert world.now == pytest.approx(sum(seconds))


def test_a_gap_ends_the_rest() -> None:
    """But for as much of it as was worked, where the server serves."""
    turns = Turns()
    turns.worked(0.25, 5.0)
    assert turns.rest_s(is_busy=False, now=5.0) == 0
    assert turns.rest_s(is_busy=True, now=5.0) == 2.5
    assert turns.rest_s(is_busy=False, now=5.125) == 0.125
    assert turns.rest_s(is_busy=False, now=5.25) == 0
    assert turns.rest_s(is_busy=True, now=7.5) == 0
    turns.worked(0.25, 8.0)
    assert turns.rest_s(is_busy=False, now=8.0) == 0, "nothing was served for half a second"


def test_time_at_a_disk_needs_no_rest() -> None:
    """What counts is the processor's time, which others would have had."""
    gaps = Gaps(Busy())
    gaps.wait()
    time.sleep(0.5)
    began = time.monotonic()
    gaps.wait()
    # A rest for the time asleep would take 5 s.
    assert time.monotonic() - began < 4.0
