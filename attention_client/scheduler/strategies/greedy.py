"""Greedy balance: the oldest request first, then one by one what evens the experts' loads most.

L is the load of the batch so far (and of what is running), v that of a candidate. With equal totals per
request Var(L + v), |L + v|^2 and the distance from an even load rank candidates alike, and v.L does but for
|v|^2. All are O(B W E). After "Heuristics for Vector Bin Packing" (Panigrahy et al., 2011).
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

__all__ = [
    "BestFit",
    "GreedyDotProduct",
    "GreedyVariance",
    "NormMinimizing",
    "PowerOfD",
    "PowerOfDDot",
]


class GreedyVariance(SelectionStrategy):
    """Least Var(L + v): the objective of CAPS."""

    name = "greedy_variance"

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """See `SelectionStrategy`."""
        return _greedy(window_WE, batch_size, context, square=1.0, variance=1.0)


class NormMinimizing(SelectionStrategy):
    """Least |L + v|^2."""

    name = "norm_minimizing"

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """See `SelectionStrategy`."""
        return _greedy(window_WE, batch_size, context, square=1.0)


class GreedyDotProduct(SelectionStrategy):
    """Least v.L: the candidate that asks least of the experts that are loaded."""

    name = "greedy_dot_product"

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """See `SelectionStrategy`."""
        return _greedy(window_WE, batch_size, context)


class BestFit(SelectionStrategy):
    """Least distance of L + v from the even load of a full batch of the window's mean request."""

    name = "best_fit"

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """See `SelectionStrategy`."""
        # The mean over the window is the mean per request and expert.
        level = batch_size * float(window_WE.mean())
        return _greedy(window_WE, batch_size, context, square=1.0, level=level)


class PowerOfD(SelectionStrategy):
    """Least Var(L + v) of d candidates that are drawn anew at each step. O(B d E).

    After "The Power of Two Choices in Randomized Load Balancing" (Mitzenmacher, 2001).

    Args:
        d: Candidates of a step.
    """

    name = "power_of_d"

    def __init__(self, d: int = 8) -> None:
        self.d = d

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """See `SelectionStrategy`."""
        draws = rng.random(self.d * batch_size)
        return _greedy(
            window_WE, batch_size, context, square=1.0, variance=1.0, draws=draws, d=self.d
        )


class PowerOfDDot(PowerOfD):
    """Least v.L of d candidates that are drawn anew at each step. O(B d E)."""

    name = "power_of_d_dot"

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """See `SelectionStrategy`."""
        draws = rng.random(self.d * batch_size)
        return _greedy(window_WE, batch_size, context, draws=draws, d=self.d)


def _greedy(
    window_WE: Loads,
    batch_size: int,
    context: Context,
    *,
    square: float = 0.0,
    level: float = 0.0,
    variance: float = 0.0,
    draws: Loads | None = None,
    d: int = 0,
) -> Indices:
    requests, experts = window_WE.shape
    chosen = first(min(requests, batch_size))
    if draws is not None:
        draws = draws[: (len(chosen) - 1) * d]
    _select.greedy(
        window_WE, requests, experts, context.running_E, chosen, 1, len(chosen),
        square, level, variance, draws, d,
    )  # fmt: skip
    return chosen
