"""Memory in mappings of its own: it is really freed, and pages that nobody touches take none."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from pathlib import Path

import torch

__all__ = ["available_bytes", "huge_memory", "trim"]

_HUGE_BYTES = 2 << 20


def available_bytes(proc: Path = Path("/proc")) -> int:
    """Bytes of the machine's memory that are available without swapping.

    Raises:
        OSError: The kernel does not tell.
    """
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    raise OSError(f"{proc}/meminfo has no MemAvailable")


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


def trim() -> None:
    """Return malloc's free pages to the system, if it is glibc's, after experts were packed or unloaded.

    Takes about 5 ms per 100 MB.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
