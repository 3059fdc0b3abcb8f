"""The end of a process: a signal, or a reason of its own."""

from __future__ import annotations

import queue
import signal
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Shutdown"]


class Shutdown:
    """Within `with Shutdown() as shutdown`, SIGTERM and SIGINT end `shutdown.wait()`.

    For the main thread (Python delivers signals there only).
    """

    def __init__(self) -> None:
        # A SimpleQueue, since its put may interrupt a get of the same thread; an Event's set inside
        # a signal handler can deadlock with the wait that it interrupts.
        self._reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
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

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.request(signal.Signals(number).name)

    def request(self, reason: str) -> None:
        """Ends `wait` (from any thread)."""
        self._reasons.put(reason)

    def wait(self) -> str:
        """Blocks until a signal or a request; returns its name or reason."""
        return self._reasons.get()
