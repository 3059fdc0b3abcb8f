"""The memory of the paged key-value cache, which is taken only as the cache fills up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from eaas.free_memory import free_bytes
from eaas.memory import huge_memory

__all__ = ["AttentionShape", "LayerCache", "PagedCache", "windows_of"]

# Expert servers of this machine need memory, too.
_SHARE = 4
_MOST_BYTES = 4 << 30
_LEAST_BLOCKS = 64


class AttentionShape(NamedTuple):
    """What a token has in one layer of the cache.

    Attributes:
        heads: Key-value heads.
        key: Values of a key.
        value: Values of a value.
        is_latent: Whether the value is the first part of the key (`latent.py`).
    """

    heads: int
    key: int
    value: int
    is_latent: bool

    @property
    def values(self) -> int:
        """Numbers that a token takes."""
        return self.heads * (self.key if self.is_latent else self.key + self.value)


class LayerCache(NamedTuple):
    """One layer's part of the cache, as `_paged.attend` takes it.

    Attributes:
        keys: (rows, kv_heads, D).
        values: (rows, kv_heads, V).
        kind: Index of the layer's tables.
        block_rows: Rows from one block to the next.
        page: Tokens of a block.
        window: Tokens that a token sees; 0: all before it.
    """

    keys: torch.Tensor
    values: torch.Tensor
    kind: int
    block_rows: int
    page: int
    window: int


def windows_of(config: Any) -> list[int]:
    """Return the sliding window of each layer; 0: none.

    Args:
        config: transformers' configuration of a text model.

    Raises:
        ValueError: A layer has attention of another type.
    """
    window = getattr(config, "sliding_window", None) or 0
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * config.num_hidden_layers
    if unknown := set(types) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"it has layers of {', '.join(sorted(unknown))}")
    return [window if each == "sliding_attention" else 0 for each in types]


class PagedCache:
    """Keys and values of all layers, in blocks of `page` tokens.

    Args:
        shapes: Of each layer, by its index.
        windows: Of each layer.
        dtype: Of keys and values.
        page: Tokens of a block.
        blocks: Blocks of the layers without a window; None: a quarter of the free memory, at most 4 GiB, and
            at least 64 blocks.
        sequences: Most sequences at a time. A window never needs more blocks than these have.

    Attributes:
        kinds: Windows, each with its layers, in the order of a sequence's tables.
        blocks: Blocks of each kind.
        block_bytes: Bytes of a block of each kind, of all its layers together.
        page: Tokens of a block.

    Raises:
        MemoryError: The wanted blocks need more memory than is free.
    """

    def __init__(
        self,
        shapes: Mapping[int, AttentionShape],
        windows: list[int],
        dtype: torch.dtype,
        page: int,
        blocks: int | None,
        sequences: int,
    ) -> None:
        self.page = page
        self.kinds: dict[int, list[int]] = {}
        for layer in sorted(shapes):
            self.kinds.setdefault(windows[layer], []).append(layer)
        self.block_bytes = [
            sum(shapes[layer].values for layer in layers) * page * dtype.itemsize
            for layers in self.kinds.values()
        ]
        self.blocks = self._fitting(blocks, sequences)
        self._shapes, self._dtype = shapes, dtype

    def _fitting(self, wanted: int | None, sequences: int) -> list[int]:
        # Blocks that a kind can use at all.
        most = [sequences * -(-window // self.page) if window else 1 << 62 for window in self.kinds]

        def of(blocks: int) -> list[int]:
            return [min(blocks, each) for each in most]

        def size(blocks: int) -> int:
            return sum(map(math.prod, zip(of(blocks), self.block_bytes, strict=True)))

        free = free_bytes()
        if wanted is not None:
            if size(wanted) > free:
                raise MemoryError(
                    f"it takes {size(wanted) >> 20:,} MiB, and {free >> 20:,} MiB are free"
                )
            return of(wanted)
        room = min(free // _SHARE, _MOST_BYTES)
        # Kinds with few blocks leave their room to the others.
        blocks = room // sum(self.block_bytes)
        for _ in self.kinds:
            open_bytes = sum(
                bytes_ for bytes_, each in zip(self.block_bytes, most, strict=True) if each > blocks
            )
            if open_bytes:
                blocks += max(0, room - size(blocks)) // open_bytes
        return of(max(_LEAST_BLOCKS, blocks))

    def layers(self, latent_heads: int) -> dict[int, LayerCache]:
        """Make the memory; return each layer's part, by its index.

        Args:
            latent_heads: Key-value heads that have the row of a token in common, in latent layers.
        """
        found = {}
        for kind, (window, layers) in enumerate(self.kinds.items()):
            by_shape: dict[AttentionShape, list[int]] = {}
            for layer in layers:
                by_shape.setdefault(self._shapes[layer], []).append(layer)
            for shape, alike in by_shape.items():
                block_rows = self.page * len(alike)
                rows = self.blocks[kind] * block_rows
                keys = self._memory(rows, shape.heads, shape.key)
                values = keys[..., : shape.value]
                if not shape.is_latent:
                    values = self._memory(rows, shape.heads, shape.value)
                for place, layer in enumerate(alike):
                    first = place * self.page
                    heads = latent_heads if shape.is_latent else shape.heads
                    found[layer] = LayerCache(
                        keys[first:].expand(-1, heads, -1),
                        values[first:].expand(-1, heads, -1),
                        kind,
                        block_rows,
                        self.page,
                        window,
                    )
        return found

    def _memory(self, rows: int, heads: int, size: int) -> torch.Tensor:
        memory = huge_memory(rows * heads * size * self._dtype.itemsize)
        return memory.view(self._dtype).view(rows, heads, size)
