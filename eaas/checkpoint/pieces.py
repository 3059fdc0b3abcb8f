"""Weights are read and packed in pieces, so that whoever does it can let others go first in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator

__all__ = ["PIECE_BYTES", "Look", "Pause", "at_once", "pieces", "unseen"]

# Takes a core about a millisecond.
PIECE_BYTES = 1 << 20

Pause = Callable[[], None]
"""Called before each piece, by the thread that works on it; returns when the piece may begin."""


Look = Callable[[memoryview], object]
"""Called with each piece that was read, while the processor's cache holds it."""


def at_once() -> None:
    """The pause of whoever waits for nobody."""


def unseen(_piece: memoryview) -> None:
    """The default `look`: takes the pieces as they are."""


def pieces(count: int, most: int = PIECE_BYTES) -> Iterator[tuple[int, int]]:
    """(begin, end) of pieces that make up 0 to `count`, each of `most` but for the last."""
    for begin in range(0, count, most):
        yield begin, min(begin + most, count)
