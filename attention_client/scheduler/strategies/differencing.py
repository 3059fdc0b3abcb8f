"""Number partitioning: split the window into similar batches and take the oldest request's batch.

The balanced largest differencing method (Michiels et al., "Performance Ratios for the Differencing Method
Applied to the Balanced Number Partitioning Problem", 2003): Karmarkar and Karp's method with groups of equal
size. If the window is no multiple of the batch size, the youngest requests are left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from attention_client.scheduler.strategies.base import (
    Context,
    Indices,
    Loads,
    SelectionStrategy,
    first,
)

__all__ = ["Differencing", "KarmarkarKarp"]


class KarmarkarKarp(SelectionStrategy):
    """Splits by the load of each request's hottest expert. O(W E + W^2)."""

    name = "karmarkar_karp"

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """See `SelectionStrategy`."""
        return _first_group(window_WE.max(axis=1, keepdims=True), batch_size)


class Differencing(SelectionStrategy):
    """Splits by the load vectors: joins two partial splits so that dissimilar groups meet. O(W^2 E)."""

    name = "differencing"

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """See `SelectionStrategy`."""
        return _first_group(window_WE, batch_size)


class _Split(NamedTuple):
    """A partial split into groups of N requests each: its members, and their total loads."""

    members_GN: Indices
    load_GE: Loads

    def difference(self) -> float:
        """Sum over experts of the largest minus the least load of a group."""
        return float(np.ptp(self.load_GE, axis=0).sum())


def _first_group(sizes_WE: Loads, batch_size: int) -> Indices:
    groups = len(sizes_WE) // batch_size
    if groups <= 1:
        return first(min(len(sizes_WE), batch_size))
    order = _by_size(sizes_WE[: groups * batch_size]).reshape(batch_size, groups, 1)
    splits = [_Split(members_G1, sizes_WE[members_G1[:, 0]]) for members_G1 in order]
    while len(splits) > 1:
        # Join the two that differ most.
        ranks = np.argsort([-split.difference() for split in splits], kind="stable")
        low, high = sorted(ranks[:2])
        splits[low] = _join(splits[low], splits[high])
        splits[high] = splits[-1]
        del splits[-1]
    members_GN = splits[0].members_GN
    return np.sort(members_GN[(members_GN == 0).any(axis=1)][0])


def _join(one: _Split, other: _Split) -> _Split:
    """Let each group, largest first, take the other split's group with the smallest dot product."""
    meets_GG = one.load_GE @ other.load_GE.T
    taken_G = np.empty(len(meets_GG), dtype=np.int64)
    for group in _by_size(one.load_GE):
        taken_G[group] = best = np.argmin(meets_GG[group])
        meets_GG[:, best] = np.inf
    return _Split(
        np.concatenate((one.members_GN, other.members_GN[taken_G]), axis=1),
        one.load_GE + other.load_GE[taken_G],
    )


def _by_size(load_NE: Loads) -> Indices:
    """Indices by falling norm; of equals the lower one first."""
    return np.argsort(-np.einsum("ne,ne->n", load_NE, load_NE), kind="stable")
