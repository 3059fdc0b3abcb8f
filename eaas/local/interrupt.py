"""The operator's wish to end, as something that a launcher can wait for."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Interrupt", "Interrupted"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A person, or the system, wants the cluster to end."""


class Interrupt:
    """Within `with Interrupt() as interrupt`, Ctrl-C, SIGTERM and SIGHUP end `interrupt.wait`.

    No exception out of a signal handler: it could come between the start of a process and the note of it, or
    in the middle of the end. For the main thread (Python delivers signals there only).

    Attributes:
        fd: Readable, and for good, once a signal has come.
    """

    def __init__(self) -> None:
        self.fd, self._write_fd = os.pipe()
        self._told = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in _SIGNALS:
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
        os.close(self.fd)
        os.close(self._write_fd)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # The second one, and the hundredth, change nothing.
        if not self._told:
            self._told = True
            os.write(self._write_fd, b"!")

    def wait(self, timeout_s: float) -> None:
        """Sleep for that long. Raises Interrupted as soon as a signal has come."""
        if select.select([self.fd], [], [], timeout_s)[0]:
            raise Interrupted
