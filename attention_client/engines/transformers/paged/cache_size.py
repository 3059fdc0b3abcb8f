"""The size of the key-value cache, and its memory, which is taken only as the cache fills up."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler
from transformers.generation.continuous_batching.utils import (
    find_head_dim,
    find_num_key_value_heads,
)

from eaas.free_memory import free_bytes
from eaas.memory import huge_memory

__all__ = ["UntouchedZeros", "blocks_that_fit", "sized_already"]

# Expert servers of this machine need memory, too.
_SHARE = 4
_MOST_BYTES = 4 << 30
_LEAST_BLOCKS = 64


def blocks_that_fit(config: Any, dtype: torch.dtype, page: int, wanted: int | None = None) -> int:
    """Return how many blocks a cache has: a quarter of the free memory, at most 4 GiB, at least 64 blocks.

    Args:
        config: transformers' configuration of the text model.
        dtype: Of keys and values.
        page: Tokens of a block.
        wanted: So many blocks instead.

    Raises:
        MemoryError: The wanted blocks need more memory than is free.
    """
    heads, head_size = find_num_key_value_heads(config), find_head_dim(config)
    block = config.num_hidden_layers * 2 * heads * head_size * dtype.itemsize * page
    free = free_bytes()
    if wanted is None:
        # The memory is taken only as the cache fills up.
        return max(_LEAST_BLOCKS, int(min(free // _SHARE, _MOST_BYTES) // block))
    if wanted * block > free:
        raise MemoryError(f"it takes {wanted * block >> 20:,} MiB, and {free >> 20:,} MiB are free")
    return wanted


@contextmanager
def sized_already() -> Iterator[None]:
    """Inside the block, transformers makes a cache without its own check that it fits into memory.

    That check counts attention masks, which paged attention does not make, and takes the memory of NUMA nodes
    for all there is; a virtual machine's node may report less than the process has.
    """
    own = PagedAttentionMemoryHandler.get_available_memory
    PagedAttentionMemoryHandler.get_available_memory = lambda _: sys.maxsize
    try:
        yield
    finally:
        PagedAttentionMemoryHandler.get_available_memory = own


class UntouchedZeros(TorchFunctionMode):
    """Inside the block, `torch.zeros` makes bytes on the CPU of memory that is not touched yet.

    transformers makes its whole cache by `torch.zeros`, which writes every page.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        """Run a function of torch, or make the memory. Called by torch."""
        kwargs = kwargs or {}
        is_cpu = torch.device(kwargs.get("device") or "cpu").type == "cpu"
        if func is torch.zeros and kwargs.get("dtype") is torch.uint8 and is_cpu and len(args) == 1:
            return huge_memory(int(args[0]))
        found: torch.Tensor = func(*args, **kwargs)
        return found
