"""Added network latency in the expert server's loop, for experiments with distance.

The loop sees each request a fixed time after it was written. The server is not busy in that time.
"""

from __future__ import annotations

from collections import deque

from expert_server.loop.slots import Request

__all__ = ["AddedLatency"]


class AddedLatency:
    """A queue that delays each request by a fixed time before the loop batches it.

    Args:
        seconds: The delay.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._requests: deque[Request] = deque()

    def put(self, request: Request) -> None:
        """Queue an admitted request; `arrived` returns it once its delay, from `admitted_at` on, is over."""
        self._requests.append(request)

    def arrived(self, now: float) -> list[Request]:
        """Remove and return the requests whose delay is over, for the batcher, as if admitted `now`."""
        arrived = []
        while self._requests and self._requests[0].admitted_at + self._seconds <= now:
            # The delay does not count as the server's time.
            arrived.append(self._requests.popleft()._replace(admitted_at=now))
        return arrived

    def next_at(self) -> float | None:
        """When the next delay is over, in monotonic seconds: the loop then wakes. None: no request."""
        return self._requests[0].admitted_at + self._seconds if self._requests else None
