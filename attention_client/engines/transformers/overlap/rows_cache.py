"""Give each micro-batch of a forward pass its rows of the key-value cache.

The micro-batches write into one tensor per layer, which replaces the cache's tensor when the last of them has
written. The cache stays transformers' own, with as many copies as transformers makes
(one whenever a layer grows), so operations between passes, such as beam reordering, work as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

__all__ = ["can_be_split", "rows_caches"]


def can_be_split(cache: Any) -> bool:
    """Return whether a key-value cache can be split by rows; if not, its batch is not overlapped."""
    return (
        type(cache) is DynamicCache
        and not cache.offloading
        and bool(cache.layers)
        and all(
            type(layer) is DynamicLayer
            or (type(layer) is DynamicSlidingWindowLayer and not layer.record_past)
            for layer in cache.layers
        )
    )


def rows_caches(cache: DynamicCache, rows: Sequence[slice], batch: int) -> list[Cache]:
    """Make one cache per micro-batch, which holds its rows of the whole batch's cache.

    Args:
        cache: The whole batch's cache; `can_be_split` holds for it.
        rows: Rows of each micro-batch, with start and stop; together all rows.
        batch: Number of sequences.
    """
    growths = [_Growth(layer, batch) for layer in cache.layers]
    return [Cache(layers=[_RowsLayer(growth, part) for growth in growths]) for part in rows]


class _Growth:
    """New keys and values of one cache layer; committed to it once the micro-batches wrote every row."""

    def __init__(self, layer: DynamicLayer, batch: int) -> None:
        self.layer = layer
        self._batch = self._missing = batch
        self._past = layer.keys.shape[-2] if layer.get_seq_length() else 0
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def add(
        self, rows: slice, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens of some rows; the last ones commit. Returns all tokens of these rows."""
        if self._keys is None or self._values is None:
            self._keys, self._values = self._grown(keys), self._grown(values)
        past = self._past
        for grown, old, new in (
            (self._keys, self.layer.keys, keys),
            (self._values, self.layer.values, values),
        ):
            if past:
                grown[rows, :, :past] = old[rows]
            grown[rows, :, past:] = new
        grown_keys, grown_values = self._keys, self._values
        self._missing -= rows.stop - rows.start
        if not self._missing:
            self._commit(grown_keys, grown_values, keys.shape[-2])
        return grown_keys[rows], grown_values[rows]

    def _grown(self, new: torch.Tensor) -> torch.Tensor:
        _, heads, tokens, width = new.shape
        return new.new_empty((self._batch, heads, self._past + tokens, width))

    def _commit(self, keys: torch.Tensor, values: torch.Tensor, new_tokens: int) -> None:
        layer = self.layer
        if not layer.is_initialized:
            layer.lazy_initialization(keys, values)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length += new_tokens
            keep = slice(1 - layer.sliding_window, None)
            keys, values = keys[:, :, keep], values[:, :, keep]
        layer.keys, layer.values = keys, values


class _RowsLayer(CacheLayerMixin):  # type: ignore[misc]
    """One micro-batch's view of a cache layer: its attention reads and writes only its rows."""

    def __init__(self, growth: _Growth, rows: slice) -> None:
        super().__init__()
        self._growth = growth
        self._rows = rows
        self.is_sliding = growth.layer.is_sliding
        self._seen = growth.layer.get_seq_length()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing, because `_Growth` initialises the layer."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the new tokens of these rows, for attention. Returns all their tokens, as transformers does."""
        self._seen += key_states.shape[-2]
        self.keys, self.values = self._growth.add(self._rows, key_states, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (kv_length, kv_offset) for the attention mask. Call it before any micro-batch writes."""
        sizes: tuple[int, int] = self._growth.layer.get_mask_sizes(query_length)
        return sizes

    def get_seq_length(self) -> int:
        """Return the number of tokens cached, including these rows' new ones once they are written."""
        return int(self._seen)

    def get_max_length(self) -> int:
        """Return the longest sequence that the whole batch's cache layer can hold, as transformers asks."""
        return int(self._growth.layer.get_max_length())
