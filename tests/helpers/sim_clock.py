"""Simulated time: an agenda, and greenlets as threads."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import greenlet


class Violation(AssertionError):
    """An invariant is violated."""


def demand(condition: Any, what: str) -> None:
    if not condition:
        raise Violation(what)


class Agenda:
    """Simulated time: actions by their time."""

    def __init__(self) -> None:
        self.now = 100.0
        self._steps = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._broadcaster = greenlet.getcurrent()

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._steps += 1
        heapq.heappush(self._heap, (max(when, self.now), self._steps, action))

    def run_until(self, end: float) -> None:
        while self._heap and self._heap[0][0] <= end:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = end

    def spawn(self, work: Callable[[], None]) -> None:
        """Run `work` like a thread: it may call `pause`."""
        self.at(self.now, greenlet.greenlet(work, self._broadcaster).switch)

    def pause(self, waiters: list[Callable[[], None]], timeout_s: float) -> None:
        """Sleep until one of `waiters` is called, or until the timeout; only for spawned work."""
        me = greenlet.getcurrent()
        asleep = [True]

        def wake() -> None:
            if asleep[0]:
                asleep[0] = False
                self.at(self.now, me.switch)

        waiters.append(wake)
        if timeout_s < 1e6:
            self.at(self.now + max(timeout_s, 1e-6), wake)
        self._broadcaster.switch()
        waiters.remove(wake)


@contextmanager
def jumping_wall_clock(seed: float) -> Any:
    """Make the wall clock jump by hours, so that decisions based on it go wrong."""
    dice, real = random.Random(seed), (time.time, time.time_ns)
    time.time = lambda: 1.8e9 + dice.uniform(-7200, 7200)  # type: ignore[assignment]
    time.time_ns = lambda: int(time.time() * 1e9)  # type: ignore[assignment]
    try:
        yield
    finally:
        time.time, time.time_ns = real
