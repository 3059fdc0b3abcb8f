"""Weights are loaded in the gaps between batches.

A load moves as many bytes a second as memory gives, and a batch beside it waits for that memory, whatever
the priorities say. So a load is cut into pieces (`eaas.checkpoint.pieces`), and before each of them the
loader looks whether a request is there. While one is, it rests; but of a server that never has a gap it
takes one part in eleven, so that a load always ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Gaps", "Turns"]

# A loader that worked for t seconds rests for so many t at most.
_REST = 10.0
_LOOK_S = 2e-4


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
        is_busy: Whether a request waits, or is computed.
        clock: Monotonic seconds.
        worked_s: Seconds of a processor that this thread has had: to wait for a disk disturbs nobody.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self,
        is_busy: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        worked_s: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._is_busy = is_busy
        self._clock = clock
        self._worked_s = worked_s
        self._sleep = sleep
        self._turns = Turns()
        self._began_at = worked_s()

    def wait(self) -> None:
        """The `Pause` of that load (`eaas.checkpoint.pieces`)."""
        self._turns.worked(self._worked_s() - self._began_at, self._clock())
        while not self._turns.may_begin(self._is_busy(), self._clock()):
            self._sleep(_LOOK_S)
        self._began_at = self._worked_s()
