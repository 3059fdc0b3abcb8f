"""Weights are loaded in the gaps between batches.

A load moves as many bytes a second as memory gives, and a batch beside it waits for that memory, whatever
the priorities say. So a load is cut into pieces (`eaas.checkpoint.pieces`), and before each of them the
loader looks whether a request is there. While one is, it rests; but of a server that never has a gap it
takes one part in eleven, so that a load always ends. And in the gaps of a server that serves it rests for
as long as it worked: others on the same machine, clients among them, are at work there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["Batches", "Gaps", "Turns"]

# A loader that worked for t seconds rests for so many t at most.
_REST = 10.0
# The same, in the gaps of a server that had a request a short time ago.
_REST_IN_GAP = 1.0
_RECENT_S = 0.5


class Batches(Protocol):
    """What a loader goes behind: the server's loop."""

    @property
    def is_busy(self) -> bool:
        """Whether a request waits, or is computed."""

    def wait_idle(self, timeout_s: float) -> None:
        """Returns when none is any more, or when the time is over."""


class Turns:
    """Whose turn it is, the batches' or the loader's. Pure: times come in."""

    def __init__(self) -> None:
        self._worked_s = self._ended_at = 0.0
        self._busy_at = -math.inf

    def worked(self, seconds: float, now: float) -> None:
        """A piece ended now, and took the loader so long."""
        self._worked_s, self._ended_at = seconds, now

    def rest_s(self, is_busy: bool, now: float) -> float:
        """For how long the next piece waits, if nothing changes; 0: it may begin.

        Args:
            is_busy: Whether a request waits, or is computed.
            now: Monotonic seconds.
        """
        if is_busy:
            self._busy_at = now
        serves = now - self._busy_at < _RECENT_S
        rest = _REST if is_busy else _REST_IN_GAP if serves else 0.0
        return max(0.0, self._ended_at + rest * self._worked_s - now)


class Gaps:
    """The pauses of one load. Made and used by the thread that loads.

    Args:
        batches: Go first.
        clock: Monotonic seconds.
        worked_s: Seconds of a processor that this thread has had: to wait for a disk disturbs nobody.
        sleep: Waits for so many seconds.
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
        self._turns = Turns()
        self._began_at = worked_s()

    def wait(self) -> None:
        """The `Pause` of that load (`eaas.checkpoint.pieces`)."""
        now = self._clock()
        self._turns.worked(self._worked_s() - self._began_at, now)
        while rest_s := self._turns.rest_s(is_busy := self._batches.is_busy, now):
            # A gap ends a long rest; what is left of a short one is not worth being woken for.
            (self._batches.wait_idle if is_busy else self._sleep)(rest_s)
            now = self._clock()
        self._began_at = self._worked_s()
