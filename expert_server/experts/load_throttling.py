"""Throttles an expert server's weight loads in favour of its loop's batches.

A load uses all of the memory bandwidth, and a concurrent batch waits for it, whatever the thread priorities.
So a load is cut into pieces (`eaas.checkpoint.pieces`), and the loader checks for requests before each of
them. While a request waits, the loader pauses, but it gets at least one part in eleven of the time, so that
every load ends. Between the batches of a busy server it works half of the time, because other
processes of the machine, such as clients, also use the memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from expert_server.loop.loop import ServeLoop

__all__ = ["LoadThrottle"]

# Longest pause of the loader during a batch, relative to the work before it.
_PAUSE_DURING_BATCH = 10.0
# The same between batches, if there was a request a short time ago.
_PAUSE_BETWEEN_BATCHES = 1.0
_RECENT_S = 0.5


class LoadThrottle:
    """Pauses one weight load in favour of the loop's batches. Create and use it in the loading thread.

    Args:
        loop: The serving loop, which has precedence over loads.
        clock: Monotonic seconds.
        worked_s: CPU seconds of this thread. Waiting for a disk does not count: it disturbs no batch.
        sleep: Sleeps for some seconds.
    """

    def __init__(
        self,
        loop: ServeLoop,
        clock: Callable[[], float] = time.monotonic,
        worked_s: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._loop = loop
        self._clock = clock
        self._worked_s = worked_s
        self._sleep = sleep
        self._busy_at = -math.inf
        self._began_at = worked_s()

    def wait(self) -> None:
        """Block the load before its next piece, to give way to batches; an idle server's load never waits.

        It is the load's `Pause` (`eaas.checkpoint.pieces`).
        """
        worked_s = self._worked_s() - self._began_at
        ended_at = now = self._clock()
        while True:
            if is_busy := self._loop.is_busy:
                self._busy_at = now
            serves = now - self._busy_at < _RECENT_S
            pause = _PAUSE_DURING_BATCH if is_busy else _PAUSE_BETWEEN_BATCHES if serves else 0.0
            pause_s = ended_at + pause * worked_s - now
            if pause_s <= 0:
                break
            # The end of a batch ends a long pause early. A short one sleeps to its end.
            (self._loop.wait_idle if is_busy else self._sleep)(pause_s)
            now = self._clock()
        self._began_at = self._worked_s()
