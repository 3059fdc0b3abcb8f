"""Weights are loaded in the gaps between batches.

A load moves as many bytes a second as memory gives, and a batch beside it waits for that memory, whatever
the priorities say. So a load is cut into pieces (`eaas.checkpoint.pieces`), and before each of them the
loader looks whether a request is there. While one is, it rests; but of a server that never has a gap it
takes one part in eleven, so that a load always ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["Batches", "Gaps", "Turns"]

# A loader that worked for t seconds rests for so many t at most.
_REST = 10.0


class Batches(Protocol):
    """What a loader goes behind: the server's loop."""

    @property
    def is_busy(self) -> bool:
        """Whether a request waits, or is computed."""

    def wait_idle(self, timeout_s: float) -> None:
        """Returns when none is any more, or when the time is over."""


class Turns:
    """Whose turn it is, the batches' or the loader's. Pure: times come in.

    Attributes:
        rests_until: When a piece begins even though there is work, monotonic seconds.
    """

    def __init__(self) -> None:
        self.rests_until = 0.0

    def worked(self, seconds: float, now: float) -> None:
        """A piece ended now, and took the loader so long."""
        self.rests_until = now + _REST * seconds

    def may_begin(self, is_busy: bool, now: float) -> bool:
        """Whether the next piece may begin.

        Args:
            is_busy: Whether a request waits, or is computed.
            now: Monotonic seconds.
        """
        return not is_busy or now >= self.rests_until


class Gaps:
    """The pauses of one load. Made and used by the thread that loads.

    Args:
        batches: Go first.
        clock: Monotonic seconds.
        worked_s: Seconds of a processor that this thread has had: to wait for a disk disturbs nobody.
    """

    def __init__(
        self,
        batches: Batches,
        clock: Callable[[], float] = time.monotonic,
        worked_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._batches = batches
        self._clock = clock
        self._worked_s = worked_s
        self._turns = Turns()
        self._began_at = worked_s()

    def wait(self) -> None:
        """The `Pause` of that load (`eaas.checkpoint.pieces`)."""
        now = self._clock()
        self._turns.worked(self._worked_s() - self._began_at, now)
        while not self._turns.may_begin(self._batches.is_busy, now):
            self._batches.wait_idle(self._turns.rests_until - now)
            now = self._clock()
        self._began_at = self._worked_s()
