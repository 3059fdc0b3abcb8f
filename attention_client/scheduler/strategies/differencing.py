"""Number-partitioning strategies: split the window into similar batches, take the oldest request's batch.

The balanced largest differencing method (Michiels et al., "Performance Ratios for the Differencing Method
Applied to the Balanced Number Partitioning Problem", 2003): Karmarkar and Karp's method with groups of equal
size. If the window is no multiple of the batch size, the youngest requests are left out.
"""

from __future__ import annotations

import numpy as np

from attention_client.scheduler.strategies import _select
from attention_client.scheduler.strategies.base import (
    Context,
    Indices,
    Loads,
    SelectionStrategy,
    first,
)

__all__ = ["Differencing", "KarmarkarKarp"]


class KarmarkarKarp(SelectionStrategy):
    """Splits the window by the load of each request's hottest expert. O(W E + W^2)."""

    name = "karmarkar_karp"

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """Choose the oldest request's batch of a split by hottest expert (see `SelectionStrategy`)."""
        peak_W = np.ascontiguousarray(window_WE.max(axis=1, keepdims=True))
        return _first_group(peak_W, batch_size)


class Differencing(SelectionStrategy):
    """Splits the window by load vectors, joining partial splits so that dissimilar groups meet. O(W^2 E)."""

    name = "differencing"

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """Choose the oldest request's batch of a split by load vectors (see `SelectionStrategy`)."""
        return _first_group(window_WE, batch_size)


def _first_group(sizes_WE: Loads, batch_size: int) -> Indices:
    groups, left_out = divmod(len(sizes_WE), batch_size)
    if groups <= 1:
        return first(min(len(sizes_WE), batch_size))
    requests = len(sizes_WE) - left_out
    group_W = np.empty(requests, dtype=np.int64)
    _select.difference(sizes_WE[:requests], requests, sizes_WE.shape[1], groups, group_W)
    return np.flatnonzero(group_W == group_W[0])
