"""Memory in mappings of its own: it is really freed, and pages that nobody touches take none."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref

import torch

__all__ = ["HugeBlocks", "huge_memory", "trim"]

_HUGE_BYTES = 2 << 20
_SLAB_BYTES = 256 << 20
_BLOCK_ALIGNMENT = 64


def huge_memory(nbytes: int) -> torch.Tensor:
    """Allocate zeros, uint8 (nbytes,), in a private mapping that is freed with the tensor.

    malloc would keep freed blocks, and fragmentation would prevent their reuse. Measured on experts, that
    takes a third more memory than the weights.

    From 2 MiB on, the block is aligned to 2 MiB and uses huge pages for its whole 2 MiB units, if the system
    has them: reading is faster, with fewer TLB misses. Smaller blocks are aligned to at least 64 bytes.

    Raises:
        OSError: The system has no such memory left.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    whole = nbytes // _HUGE_BYTES * _HUGE_BYTES
    # Space to begin at a multiple of 2 MiB. Untouched pages take no memory.
    mapped = nbytes + _HUGE_BYTES if whole else nbytes
    # Private: shared memory gets no huge pages on most machines.
    mapping = mmap.mmap(-1, mapped, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
    begin = -address % _HUGE_BYTES if whole else 0
    # This is advice only. A Linux without huge pages refuses it, and the memory still works.
    with contextlib.suppress(OSError):
        # Outside the whole units a huge page would mostly be wasted. Parts with the same advice merge with
        # their neighbours into one mapping, and the number of mappings of a process is limited.
        mapping.madvise(mmap.MADV_NOHUGEPAGE, 0, begin)
        mapping.madvise(mmap.MADV_HUGEPAGE, begin, whole)
        mapping.madvise(mmap.MADV_NOHUGEPAGE, begin + whole, mapped - begin - whole)
    return torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=begin)


class HugeBlocks:
    """Blocks of memory side by side, so that small ones, and the ends of large ones, are on huge pages, too.

    The blocks come one after the other from a large mapping, which is freed with its last block. Before that,
    a block that is freed returns its pages, except for those that it shares with neighbours. One thread at a
    time.
    """

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocate zeros, uint8 (nbytes,), aligned to 64 bytes.

        Raises:
            OSError: The system has no such memory left.
        """
        if nbytes == 0 or nbytes > _SLAB_BYTES // 2:
            return huge_memory(nbytes)
        if self._used + nbytes > len(self._slab):
            self._slab, self._used = huge_memory(_SLAB_BYTES), 0
        block = self._slab[self._used : self._used + nbytes].numpy()
        self._used += -(-nbytes // _BLOCK_ALIGNMENT) * _BLOCK_ALIGNMENT
        # The tensor and its views keep this array, and the array keeps the slab.
        weakref.finalize(block, _give_back, block.ctypes.data, nbytes).atexit = False
        return torch.from_numpy(block)


def _give_back(address: int, nbytes: int) -> None:
    """Return the whole pages of a freed block to the system. Its slab is still mapped."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = (address + nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if whole > 0:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(whole), mmap.MADV_DONTNEED
        )


def trim() -> None:
    """Return malloc's free pages to the system, if it is glibc's, after experts were packed or unloaded.

    Takes about 5 ms per 100 MB.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
