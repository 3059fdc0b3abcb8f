"""The C heap of a process that many threads allocate in, and whose batches are of ever other sizes."""

from __future__ import annotations

import ctypes

__all__ = ["share_heaps", "trim_heap"]

# Of <malloc.h>: the most heaps ("arenas") that threads get.
_M_ARENA_MAX = -8
_HEAPS = 2


def share_heaps() -> None:
    """Lets threads that begin from now on allocate in two heaps; only where the C library is glibc.

    By default each gets one of its own, up to eight for each core, and what is free in one is of no use to
    the others: a process with a dozen threads would grow for hours.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(_M_ARENA_MAX, _HEAPS)


def trim_heap() -> None:
    """Gives free pages of the C heap back, which takes milliseconds; only where the C library is glibc.

    That keeps what was freed below anything that is still in use: batches of many sizes, of which the largest
    come after a stall, would hold tens of megabytes for good.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
