"""Requests that are on their way over a network that is not there.

For experiments with what distance costs: each request is seen later than it was written, and the server is
not busy meanwhile.
"""

from __future__ import annotations

from collections import deque

from expert_server.replies import Request

__all__ = ["AddedLatency"]


class AddedLatency:
    """A queue that gives each request out a fixed time after it came in.

    Args:
        seconds: That time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._requests: deque[Request] = deque()

    def put(self, request: Request) -> None:
        """A request that was written at its `admitted_at`."""
        self._requests.append(request)

    def arrived(self, now: float) -> list[Request]:
        """The requests that are there by now, in order; each once."""
        arrived = []
        while self._requests and self._requests[0].admitted_at + self._seconds <= now:
            # What it waited here is not the server's time.
            arrived.append(self._requests.popleft()._replace(admitted_at=now))
        return arrived

    def next_at(self) -> float | None:
        """When the next one will be there, in monotonic seconds; None: none is on its way."""
        return self._requests[0].admitted_at + self._seconds if self._requests else None
