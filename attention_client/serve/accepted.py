"""How many requests are accepted at a time, and how much memory their bodies may take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attention_client.serve.api_error import ApiError

__all__ = ["AcceptedRequests", "BodyMemory"]


class AcceptedRequests:
    """Counts the requests that are read, wait or run. Used on one event loop.

    Args:
        most: So many at a time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0

    @contextmanager
    def accept(self) -> Iterator[None]:
        """Counts one request. Raises ApiError (429) if there are as many as may be."""
        if self._count >= self._most:
            raise ApiError(
                429,
                f"{self._most} requests are already running or waiting. Try again later.",
                code="overloaded",
            )
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


class BodyMemory:
    """Counts the bytes of large bodies, from their arrival to their answer. Used on one event loop.

    Args:
        most_bytes: Of all of them together.
        free_bytes: So much of each body does not count, so that small requests pass while large ones wait.
    """

    def __init__(self, most_bytes: int, free_bytes: int) -> None:
        self._most = most_bytes
        self._free = free_bytes
        self._held = 0

    @contextmanager
    def body(self) -> Iterator[BodyShare]:
        """The share of one body, given back at the end."""
        share = BodyShare(self, self._free)
        try:
            yield share
        finally:
            self._held -= share.held

    def take(self, size: int) -> None:
        """Counts so many bytes. Raises ApiError (429) if they are too many."""
        if self._held + size > self._most:
            raise ApiError(
                429, "Too many large requests are being read. Try again later.", code="overloaded"
            )
        self._held += size


class BodyShare:
    """What one body holds of a `BodyMemory`."""

    def __init__(self, memory: BodyMemory, free_bytes: int) -> None:
        self._memory = memory
        self._free = free_bytes
        self.held = 0

    def grow(self, length: int) -> None:
        """The body is so long now. Raises ApiError (429)."""
        more = length - self._free - self.held
        if more > 0:
            self._memory.take(more)
            self.held += more
