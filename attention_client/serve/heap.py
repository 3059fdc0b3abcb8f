"""What a burst of requests leaves in the C heap goes back to the system once nobody asks."""

from __future__ import annotations

import ctypes

__all__ = ["trim_heap"]


def trim_heap() -> None:
    """Gives free pages of the C heap back, which takes milliseconds; only where the C library is glibc.

    That keeps what was freed below anything that is still in use: batches of many sizes, of which the largest
    come after a stall, would hold tens of megabytes for good.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
