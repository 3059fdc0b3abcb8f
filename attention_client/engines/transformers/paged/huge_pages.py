"""Huge pages for the key-value cache: a step reads it all over, and small pages miss the TLB."""

from __future__ import annotations

import ctypes

import torch

__all__ = ["use_huge_pages"]

_HUGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14


def use_huge_pages(memory: torch.Tensor) -> None:
    """Advise the system to back untouched memory with huge pages. A system without them refuses in vain."""
    begin = -(-memory.data_ptr() // _HUGE_BYTES) * _HUGE_BYTES
    end = (memory.data_ptr() + memory.nbytes) // _HUGE_BYTES * _HUGE_BYTES
    if begin < end:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_HUGEPAGE)
