"""Limits on the growth of the client's heap (glibc), under many threads and batches of changing sizes."""

from __future__ import annotations

import ctypes

__all__ = ["share_heaps", "trim_heap"]

# The mallopt parameter of <malloc.h> for the number of heaps ("arenas").
_M_ARENA_MAX = -8
_HEAPS = 2


def share_heaps() -> None:
    """Let all threads that start later share two heaps. Called at process start. No effect without glibc.

    By default glibc makes up to eight heaps for each core, and one heap cannot use the free memory of
    another: a process with a dozen threads would grow for hours.
    """
    tune = getattr(ctypes.CDLL(None), "mallopt", None)
    if tune is not None:
        tune(_M_ARENA_MAX, _HEAPS)


def trim_heap() -> None:
    """Return the heap's free pages to the system, when the engine or the prompt worker becomes idle.

    Takes milliseconds; has no effect without glibc.

    glibc itself returns only memory at the top of the heap. After batches of many sizes it would keep tens of
    megabytes below the last block in use.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
