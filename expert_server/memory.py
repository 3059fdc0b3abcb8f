"""Memory for weights and scratch, in pages of its own."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

__all__ = ["huge_memory", "trim"]

_HUGE_BYTES = 2 << 20


def huge_memory(nbytes: int) -> torch.Tensor:
    """Zeros, uint8 (nbytes,), in private pages that go back to the system with the tensor.

    malloc would keep them, and with other blocks in between it could not use them for the next block either:
    measured on experts, a third more memory than their weights have.

    From 2 MiB on, the block is aligned to 2 MiB and its whole 2 MiB pages are huge, where the system has
    such pages: reading is faster, with fewer misses of the TLB. Smaller blocks are aligned to 64 bytes at
    least.

    Raises:
        OSError: The system has no such memory left.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    whole = nbytes // _HUGE_BYTES * _HUGE_BYTES
    # Room to begin at a multiple of 2 MiB; pages that nobody touches take no memory.
    room = nbytes + _HUGE_BYTES if whole else nbytes
    # Private: memory that is shared gets no huge pages on most machines.
    mapping = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    begin = -address % _HUGE_BYTES if whole else 0
    # Advice alone: a Linux without huge pages refuses it, and the memory is as good without.
    with contextlib.suppress(OSError):
        # A huge page in the rest would mostly be waste; and being alike, the rests of neighbours become one
        # mapping, of which a process may have only so many.
        mapping.madvise(mmap.MADV_NOHUGEPAGE, 0, begin)
        mapping.madvise(mmap.MADV_HUGEPAGE, begin, whole)
        mapping.madvise(mmap.MADV_NOHUGEPAGE, begin + whole, room - begin - whole)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=begin)


def trim() -> None:
    """Has malloc give its free pages back, where it is glibc's. Takes about 5 ms for each 100 MB."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
