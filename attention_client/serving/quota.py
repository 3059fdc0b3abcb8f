"""Limits of the HTTP endpoint on what all its requests take together: sequences, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from eaas.generation.errors import ApiError

__all__ = ["Quota"]


class Quota:
    """An amount that requests share, for one event loop.

    Args:
        most: The amount.
        refusal: Message to a client whose request needs more than is left.
    """

    def __init__(self, most: int, refusal: str) -> None:
        self._left = most
        self._refusal = refusal

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that takes so much for one request; the end of the block gives all back.

        The function raises ApiError (429) if less is left.
        """
        held = 0

        def take(amount: int) -> None:
            nonlocal held
            if amount > self._left:
                raise ApiError(429, self._refusal, code="overloaded")
            self._left -= amount
            held += amount

        try:
            yield take
        finally:
            self._left += held
