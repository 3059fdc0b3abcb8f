"""Longest processing time first (Graham's list scheduling); a job's length is its load on one expert."""

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
        requests, experts = window_WE.shape
        chosen = first(min(requests, batch_size))
        _select.least_peak(window_WE, requests, experts, context.running_E, chosen, 1, len(chosen))
        return chosen
