"""The end of a process: a signal, or a reason of its own."""

from __future__ import annotations

import signal
import socket
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Shutdown", "SignalLine"]


class SignalLine:
    """Within `with`, each of these signals is a byte that can be waited for; it does nothing else.

    Python's handlers run between bytecodes: a signal that comes just before a thread goes to sleep (on a
    lock, or in select) is not noticed until something else wakes it. The C handler writes to the wakeup
    descriptor at once, and a byte in a socket cannot be missed.

    For the main thread (Python delivers signals there only).

    Args:
        signals: Which ones. Bytes of others that have a handler may come, too.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self._signals = signals
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        # A line that is full has said enough.
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._reader.close()
        self._writer.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The byte says it; without a handler nothing would write one."""


class Shutdown(SignalLine):
    """Within `with Shutdown() as shutdown`, SIGTERM and SIGINT end `shutdown.wait()`."""

    def __init__(self) -> None:
        super().__init__(signal.SIGTERM, signal.SIGINT)
        self._reason = ""

    def request(self, reason: str) -> None:
        """Ends `wait` (from any thread, while within the `with`)."""
        self._reason = reason
        self._writer.send(b"\0")

    def wait(self) -> str:
        """Blocks until a signal or a request; returns its name or reason."""
        while True:
            number = self._reader.recv(1)[0]
            if number == 0:
                return self._reason
            if number in self._signals:
                return signal.Signals(number).name
