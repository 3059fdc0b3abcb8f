"""Strategies by longest processing time first (Graham's list scheduling): loads on experts are the times."""

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
    """Takes the oldest request, then those with the highest load on one expert. O(W E + W log W)."""

    name = "lpt"

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """Choose the oldest request and those of highest peak load (see `SelectionStrategy`)."""
        take = min(len(window_WE), batch_size)
        chosen = first(take)
        peaks = window_WE[1:].max(axis=1, initial=0.0)
        chosen[1:] = 1 + np.argsort(-peaks, kind="stable")[: take - 1]
        return chosen


class LptBalanced(SelectionStrategy):
    """Takes the oldest request, then one by one the request with the least makespan. O(B W E).

    The makespan is the load of the batch's hottest expert. Of equal requests, takes the longest.
    """

    name = "lpt_balanced"

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """Choose the next batch by least load of its hottest expert (see `SelectionStrategy`)."""
        requests, experts = window_WE.shape
        chosen = first(min(requests, batch_size))
        _select.least_peak(window_WE, requests, experts, context.running_E, chosen, 1, len(chosen))
        return chosen
