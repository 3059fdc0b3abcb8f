"""Longest processing time first (Graham's list scheduling); a job's length is its load on one expert."""

from __future__ import annotations

import numpy as np

from attention_client.scheduler.strategies.base import (
    Context,
    Indices,
    Loads,
    SelectionStrategy,
    first,
)

__all__ = ["Lpt", "LptBalanced"]


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
