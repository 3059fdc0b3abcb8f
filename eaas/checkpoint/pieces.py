"""Weights are read and packed in pieces, so that other work can run in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator

__all__ = ["PIECE_BYTES", "Look", "Pause", "at_once", "pieces", "unseen"]

# About a millisecond of work for a core.
PIECE_BYTES = 1 << 20

Pause = Callable[[], None]
"""Called before each piece, by the working thread; returns when the piece may begin."""

Look = Callable[[memoryview], object]
"""Called with each piece after it was read, while it is in the CPU cache."""


def at_once() -> None:
    """The default `pause`: continue at once."""


def unseen(_piece: memoryview) -> None:
    """The default `look`: ignore the piece."""


def pieces(count: int, most: int = PIECE_BYTES) -> Iterator[tuple[int, int]]:
    """Divide the range 0 to `count` into pieces (begin, end) of at most `most`."""
    for begin in range(0, count, most):
        yield begin, min(begin + most, count)
