"""Limits of the HTTP endpoint on concurrent generations and on the memory of request bodies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from attention_client.serving.api_error import ApiError

__all__ = ["AcceptedRequests", "BodyMemory"]


class AcceptedRequests:
    """Counts the sequences that the requests of API and page generate, up to a limit. For one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0

    @contextmanager
    def accept(self) -> Iterator[Callable[[int], None]]:
        """Count one sequence until the block, its request's answer, ends. Raises ApiError (429) at the limit.

        Yields a function that counts this many further sequences of the same request; it raises, too.
        """
        held = 0

        def add(sequences: int) -> None:
            nonlocal held
            if self._count + sequences > self._most:
                raise ApiError(
                    429,
                    f"{self._most} requests are already running or waiting. Try again later.",
                    code="overloaded",
                )
            self._count += sequences
            held += sequences

        try:
            add(1)
            yield add
        finally:
            self._count -= held


class BodyMemory:
    """Counts the bytes of large request bodies, from arrival to answer, up to a limit. For one event loop.

    Args:
        most_bytes: The most bytes of all bodies together.
        free_bytes: The first bytes of each body, not counted, so that small requests pass at the limit.
    """

    def __init__(self, most_bytes: int, free_bytes: int) -> None:
        self._most = most_bytes
        self._free = free_bytes
        self._held = 0

    @contextmanager
    def body(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves memory for a body of this length; the end of the block frees it.

        The function raises ApiError (429) at the limit.
        """
        held = 0

        def grow(length: int) -> None:
            nonlocal held
            more = max(0, length - self._free - held)
            if self._held + more > self._most:
                raise ApiError(
                    429,
                    "Too many large requests are being read. Try again later.",
                    code="overloaded",
                )
            self._held += more
            held += more

        try:
            yield grow
        finally:
            self._held -= held
