"""Waiting in a role's main thread for the end of its process: a signal, or a request from within."""

from __future__ import annotations

import signal
import socket
from types import FrameType
from typing import Any, Self

__all__ = ["Shutdown", "SignalLine"]


class SignalLine:
    """Context manager that turns signals to this process into bytes of a socket.

    Python's handlers run between bytecodes, so that a signal just before a thread sleeps (on a lock, or in
    select) is not handled until something else wakes the thread. The C handler writes to the wakeup
    descriptor at once.

    Use it in the main thread, because no other thread receives signals.

    Args:
        signals: Signals to catch. Bytes of other signals with handlers may also arrive.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self._signals = signals
        self._previous: dict[signal.Signals, Any] = {}
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)

    def __enter__(self) -> Self:
        # A full socket wakes the reader anyway.
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._reader.close()
        self._writer.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Do nothing on a signal; a handler must exist so that the byte is written."""


class Shutdown(SignalLine):
    """Context manager in which SIGTERM and SIGINT end `wait`, so that the process can stop cleanly.

    A role enters it once it serves: before that, a signal ends the process at once, whatever it waits for.
    """

    def __init__(self) -> None:
        super().__init__(signal.SIGTERM, signal.SIGINT)
        self._reason = ""

    def request(self, reason: str) -> None:
        """Request the end of this process, from any thread: `wait` returns."""
        self._reason = reason
        self._writer.send(b"\0")

    def wait(self) -> str:
        """Block the monitor's or balancer's main until its end; return the signal's name or given reason."""
        while True:
            number = self._reader.recv(1)[0]
            if number == 0:
                return self._reason
            if number in self._signals:
                return signal.Signals(number).name
