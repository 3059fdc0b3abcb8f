"""The end of a process: a signal, or a reason of its own."""

from __future__ import annotations

import signal
import socket
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Shutdown"]


class Shutdown:
    """Within `with Shutdown() as shutdown`, SIGTERM and SIGINT end `shutdown.wait()`.

    For the main thread (Python delivers signals there only).
    """

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Any] = {}
        self._reason = ""

    def __enter__(self) -> Self:
        # Python's handlers run between bytecodes: a signal that comes just before a thread goes to
        # sleep on a lock (Event, Queue) is not noticed until something else wakes it. The C handler
        # writes to the wakeup descriptor at once, and a byte in a socket cannot be missed.
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno())
        for number in (signal.SIGTERM, signal.SIGINT):
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
        """`wait` reads the number from the socket; without a handler nothing would write it."""

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
            if number in self._previous:
                return signal.Signals(number).name
