"""The nixl transport's thread in client and server: polls for one-sided writes, which cause no wake-ups."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

from eaas.log import get_logger

__all__ = ["Poller"]

_logger = get_logger(__name__)
# No pauses for this long after an event, because the next one often follows soon.
_HOT_US = 300


def pause_us(idle_us: int, most_us: int) -> int:
    """Pause before the next poll after this idle time; delays an event by at most an eighth of it."""
    return 0 if idle_us < _HOT_US else min(idle_us // 8, most_us)


class Poller:
    """Thread that calls `poll` repeatedly while an event is expected.

    Args:
        name: Name of the thread.
        poll: Polls once; returns whether anything happened.
        busy: Whether an event is expected. If not, the thread sleeps until `wake`.
        most_us: Longest pause; `wake` ends a pause.
        pause: Takes microseconds; if it can, it waits in place of the poller and returns True.
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
        """Wake the polling thread, because an event is now expected, such as a peer's write."""
        with self._changed:
            self._wakes += 1
            self._moved_ns = time.monotonic_ns()
            self._changed.notify()

    def close(self) -> None:
        """Stop the polling thread and wait for its end; do not call it from within `poll`."""
        with self._changed:
            self._closed = True
            self._wakes += 1
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        _minimise_timer_slack()
        while True:
            with self._changed:
                while not self._closed and not self._busy():
                    self._changed.wait()
                if self._closed:
                    return
                wakes = self._wakes
            if self._poll_once():
                self._moved_ns = time.monotonic_ns()
                continue
            idle_us = (time.monotonic_ns() - self._moved_ns) // 1000
            wait_us = pause_us(idle_us, self._most_us)
            if self._pause(wait_us):
                continue
            if not wait_us:
                os.sched_yield()  # On a busy machine the peer may need this core.
                continue
            with self._changed:
                if self._wakes == wakes:
                    self._changed.wait(wait_us / 1e6)

    def _poll_once(self) -> bool:
        try:
            return self._poll()
        except Exception:
            # One failed poll must not end the thread.
            _logger.exception("%s: a poll failed", self._thread.name)
            return False


def _minimise_timer_slack() -> None:
    """Set the thread's timer slack to the minimum, because by default sleeps are 50 us longer."""
    pr_set_timerslack = 29
    if ctypes.CDLL(None).prctl(pr_set_timerslack, ctypes.c_ulong(1)):
        _logger.debug("timer slack not set: pauses are longer by 50 us")
