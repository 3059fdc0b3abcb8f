"""Throttling of weight loads between the batches of a serving loop.

A load uses all of the memory bandwidth, and a concurrent batch waits for it, whatever the thread priorities.
So a load is cut into pieces (`eaas.checkpoint.pieces`), and the loader checks for requests before each of
them. While a request waits, the loader pauses, but it gets at least one part in eleven of the time, so that
every load ends. Between the batches of a busy server it works half of the time: other processes of the
machine, clients among them, need the memory as well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["Batches", "LoadThrottle", "ThrottlePolicy"]

# Longest pause of the loader during a batch, relative to the work before it.
_PAUSE_DURING_BATCH = 10.0
# The same between batches, if there was a request a short time ago.
_PAUSE_BETWEEN_BATCHES = 1.0
_RECENT_S = 0.5


class Batches(Protocol):
    """The serving loop, which has precedence over loads."""

    @property
    def is_busy(self) -> bool:
        """Whether a request waits or is computed."""

    def wait_idle(self, timeout_s: float) -> None:
        """Return when no request waits or is computed, or at the timeout."""


class ThrottlePolicy:
    """When the loader may run. Pure: the caller passes times in."""

    def __init__(self) -> None:
        self._worked_s = self._ended_at = 0.0
        self._busy_at = -math.inf

    def worked(self, seconds: float, now: float) -> None:
        """A piece ended now; the loader worked this long on it."""
        self._worked_s, self._ended_at = seconds, now

    def pause_s(self, is_busy: bool, now: float) -> float:
        """How long the next piece must wait; 0: it may begin.

        Args:
            is_busy: Whether a request waits or is computed.
            now: Monotonic seconds.
        """
        if is_busy:
            self._busy_at = now
        serves = now - self._busy_at < _RECENT_S
        pause = _PAUSE_DURING_BATCH if is_busy else _PAUSE_BETWEEN_BATCHES if serves else 0.0
        return max(0.0, self._ended_at + pause * self._worked_s - now)


class LoadThrottle:
    """Pauses one load. Create and use it in the loading thread.

    Args:
        batches: The serving loop.
        clock: Monotonic seconds.
        worked_s: CPU seconds of this thread: waiting for a disk disturbs no batch.
        sleep: Sleeps for some seconds.
    """

    def __init__(
        self,
        batches: Batches,
        clock: Callable[[], float] = time.monotonic,
        worked_s: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._batches = batches
        self._clock = clock
        self._worked_s = worked_s
        self._sleep = sleep
        self._policy = ThrottlePolicy()
        self._began_at = worked_s()

    def wait(self) -> None:
        """Wait until the next piece may begin: the load's `Pause` (`eaas.checkpoint.pieces`)."""
        now = self._clock()
        self._policy.worked(self._worked_s() - self._began_at, now)
        while pause_s := self._policy.pause_s(is_busy := self._batches.is_busy, now):
            # The end of a batch ends a long pause early. A short one sleeps to its end.
            (self._batches.wait_idle if is_busy else self._sleep)(pause_s)
            now = self._clock()
        self._began_at = self._worked_s()
