"""Strategies that ignore loads: first come, first served; and random choice, as a control."""

from __future__ import annotations

import numpy as np

from attention_client.scheduler.strategies.base import (
    Context,
    Indices,
    Loads,
    SelectionStrategy,
    first,
)

__all__ = ["Fcfs", "Random"]


class Fcfs(SelectionStrategy):
    """Takes the oldest requests: first come, first served, the default. O(B)."""

    name = "fcfs"
    needs_loads = False

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """Choose the oldest requests for the next batch (see `SelectionStrategy`)."""
        return first(min(len(window_WE), batch_size))


class Random(SelectionStrategy):
    """Takes the oldest request and random others; shows the gain of mixing without a prediction. O(W)."""

    name = "random"
    needs_loads = False

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """Choose the oldest request and random others for the next batch (see `SelectionStrategy`)."""
        take = min(len(window_WE), batch_size)
        chosen = first(take)
        chosen[1:] = 1 + rng.permutation(len(window_WE) - 1)[: take - 1]
        return chosen
