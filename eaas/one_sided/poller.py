"""A thread that polls what cannot wake anybody, and sleeps when there is nothing to wait for."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

from eaas.log import get_logger

__all__ = ["Poller"]

_logger = get_logger(__name__)
# After something moved, the next thing is often close behind: no pause for so long.
_HOT_US = 300


def pause_us(idle_us: int, most_us: int) -> int:
    """How long to pause when nothing has moved for so long: what comes is late by an eighth at most."""
    return 0 if idle_us < _HOT_US else min(idle_us // 8, most_us)


class Poller:
    """Calls `poll` while there is something to wait for.

    Args:
        name: Of the thread.
        poll: Looks once; returns whether anything moved.
        busy: Whether there is something to wait for. Where not, the thread sleeps until `wake`.
        most_us: The longest pause; `wake` ends one.
        pause: Called for each pause. Waits in its own way, for about so many microseconds, where it can see
            more than the poller; returns whether it did.
    """

    def __init__(
        self,
        name: str,
        poll: Callable[[], bool],
        busy: Callable[[], bool],
        most_us: int,
        pause: Callable[[int], bool] = lambda pause_us: False,
    ) -> None:
        self._poll = poll
        self._busy = busy
        self._most_us = most_us
        self._pause = pause
        self._changed = threading.Condition()
        self._wakes = 0
        self._moved_ns = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Poll soon: there is something to wait for."""
        with self._changed:
            self._wakes += 1
            self._moved_ns = time.monotonic_ns()
            self._changed.notify()

    def close(self) -> None:
        """End the thread, and wait for its end. Not from within `poll`."""
        with self._changed:
            self._closed = True
            self._wakes += 1
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        _sleep_exactly()
        while True:
            with self._changed:
                while not self._closed and not self._busy():
                    self._changed.wait()
                if self._closed:
                    return
                wakes = self._wakes
            if self._looked():
                self._moved_ns = time.monotonic_ns()
                continue
            idle_us = (time.monotonic_ns() - self._moved_ns) // 1000
            wait_us = pause_us(idle_us, self._most_us)
            if self._pause(wait_us):
                continue
            if not wait_us:
                os.sched_yield()  # On a busy machine, what is waited for may wait for this core.
                continue
            with self._changed:
                if self._wakes == wakes:
                    self._changed.wait(wait_us / 1e6)

    def _looked(self) -> bool:
        try:
            return self._poll()
        except Exception:
            # Whatever one of them met, the others are still to be polled for.
            _logger.exception("%s: a look failed", self._thread.name)
            return False


def _sleep_exactly() -> None:
    """Have this thread's sleeps end when they are to: the kernel adds 50 us of its own by default."""
    pr_set_timerslack = 29
    if ctypes.CDLL(None).prctl(pr_set_timerslack, ctypes.c_ulong(1)):
        _logger.debug("timer slack not set: pauses are longer by 50 us")
