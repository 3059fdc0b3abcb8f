"""Number partitioning: longest processing time first, and largest differencing.

Longest processing time first is Graham's list scheduling; a job's length is its load on one expert. The
others split the window into similar batches and take the oldest request's. If the window is no multiple of
the batch size, the youngest requests are left out. They use the balanced largest differencing method
(Michiels et al., "Performance Ratios for the Differencing Method Applied to the Balanced Number Partitioning
Problem", 2003): Karmarkar and Karp's with groups of equal size.
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

__all__ = ["Differencing", "KarmarkarKarp", "Lpt", "LptBalanced"]


class Lpt(SelectionStrategy):
    """The oldest, then requests by the load of their hottest expert. O(W E + W log W)."""

    name = "lpt"

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """See `SelectionStrategy`."""
        take = min(len(window_WE), batch_size)
        chosen = first(take)
        peaks = window_WE[1:].max(axis=1, initial=0.0)
        chosen[1:] = 1 + np.argsort(-peaks, kind="stable")[: take - 1]
        return chosen


class LptBalanced(SelectionStrategy):
    """The oldest, then one by one the request with the least makespan; of equals the longest. O(B W E).

    The makespan is the load of the batch's hottest expert.
    """

    name = "lpt_balanced"

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """See `SelectionStrategy`."""
        chosen = first(min(len(window_WE), batch_size))
        load_E = window_WE[0] + (0.0 if context.running_E is None else context.running_E)
        peak_W = window_WE.max(axis=1)
        left = np.arange(1, len(window_WE))
        for place in range(1, len(chosen)):
            makespan = (window_WE[left] + load_E).max(axis=1)
            best = left[np.lexsort((-peak_W[left], makespan))[0]]
            chosen[place] = best
            load_E += window_WE[best]
            left = left[left != best]
        return chosen


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
