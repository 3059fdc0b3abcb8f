"""Greedy strategies: take the oldest request, then one by one the candidate that best evens experts' loads.

L is the load of the batch so far (and of running requests), v the load of a candidate. If all requests have
equal totals, Var(L + v), |L + v|^2 and the distance from an even load rank candidates alike, and v.L differs
only by |v|^2. All are O(B W E). After "Heuristics for Vector Bin Packing" (Panigrahy et al., 2011).
"""

from __future__ import annotations

from typing import ClassVar

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


class _Greedy(SelectionStrategy):
    """Base class: takes the least score of L + v; its weights select the score (`Objective` in select.h)."""

    _square: ClassVar[float] = 0.0
    _variance: ClassVar[float] = 0.0

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """Choose the next batch by the least score of L + v (see `SelectionStrategy`)."""
        return self._choose(window_WE, batch_size, context)

    def _choose(
        self,
        window_WE: Loads,
        batch_size: int,
        context: Context,
        *,
        level: float = 0.0,
        draws: Loads | None = None,
        d: int = 0,
    ) -> Indices:
        requests, experts = window_WE.shape
        chosen = first(min(requests, batch_size))
        if draws is not None:
            draws = draws[: (len(chosen) - 1) * d]
        _select.greedy(
            window_WE, requests, experts, context.running_E, chosen, 1, len(chosen),
            self._square, level, self._variance, draws, d,
        )  # fmt: skip
        return chosen


class GreedyVariance(_Greedy):
    """Takes the candidate with the least Var(L + v), the objective of CAPS."""

    name = "greedy_variance"
    _square = _variance = 1.0


class NormMinimizing(_Greedy):
    """Takes the candidate with the least |L + v|^2."""

    name = "norm_minimizing"
    _square = 1.0


class GreedyDotProduct(_Greedy):
    """Takes the candidate with the least v.L, that is, the least load on busy experts."""

    name = "greedy_dot_product"


class BestFit(_Greedy):
    """Takes the candidate that brings L + v closest to the even load of a full batch of mean requests."""

    name = "best_fit"
    _square = 1.0

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """Choose the next batch by the least distance from an even load (see `SelectionStrategy`)."""
        # The mean over the window is the mean per request and expert.
        level = batch_size * float(window_WE.mean())
        return self._choose(window_WE, batch_size, context, level=level)


class PowerOfD(_Greedy):
    """Takes the least Var(L + v) among d random candidates, drawn anew at each step. O(B d E).

    After "The Power of Two Choices in Randomized Load Balancing" (Mitzenmacher, 2001).

    Args:
        d: Candidates per step.
    """

    name = "power_of_d"
    _square = _variance = 1.0

    def __init__(self, d: int = 8) -> None:
        self.d = d

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """Choose the next batch, looking at d random candidates per place (see `SelectionStrategy`)."""
        draws = rng.random(self.d * batch_size)
        return self._choose(window_WE, batch_size, context, draws=draws, d=self.d)


class PowerOfDDot(PowerOfD):
    """Takes the least v.L among d random candidates, drawn anew at each step. O(B d E)."""

    name = "power_of_d_dot"
    _square = _variance = 0.0
