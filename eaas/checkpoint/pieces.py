"""Divides reading and packing of weights into pieces, so that a serving expert server can work in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator

__all__ = ["PIECE_BYTES", "Look", "Pause", "at_once", "pieces", "unseen"]

# About a millisecond of work for a core.
PIECE_BYTES = 1 << 20

Pause = Callable[[], None]
"""Callback before each piece, on the loading thread; it returns when the piece may begin."""

Look = Callable[[memoryview], object]
"""Callback with each piece right after it was read, while it is in the CPU cache."""


def at_once() -> None:
    """Do not pause before a piece (default `pause`)."""


def unseen(_piece: memoryview) -> None:
    """Ignore a piece that was read (default `look`)."""


def pieces(count: int, most: int = PIECE_BYTES) -> Iterator[tuple[int, int]]:
    """Divide the range 0 to `count` into consecutive pieces (begin, end) of at most `most`."""
    for begin in range(0, count, most):
        yield begin, min(begin + most, count)
