"""Greedy balance: the oldest request first, then one by one the candidate that evens the experts' loads most.

L is the load of the batch so far (and of what runs), v the load of a candidate. If all requests have equal
totals, Var(L + v), |L + v|^2 and the distance from an even load rank candidates alike, and v.L differs only
by |v|^2. All are O(B W E). After "Heuristics for Vector Bin Packing" (Panigrahy et al., 2011).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

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
    "choose_greedily",
]


def choose_greedily(
    window_WE: Loads,
    start_E: Loads | None,
    chosen: Indices,
    have: int,
    *,
    square: float = 0.0,
    level: float = 0.0,
    variance: float = 0.0,
    draws: Loads | None = None,
    d: int = 0,
) -> Loads:
    """Fill `chosen` beyond its first `have` indices, one by one. The least score wins; of equals the oldest.

        2 L.v + square |v|^2 - 2 level sum(v) - variance (2 sum(L) sum(v) + sum(v)^2) / E

    Args:
        window_WE: Loads of the requests.
        start_E: Load that runs already, or None.
        chosen, have: See `CostModel.choose`.
        square, level, variance: Weights of the score.
        draws: Numbers in [0, 1), d for each step, which considers only d random candidates; None: all.
        d: Candidates of a step.

    Returns:
        The total load.
    """
    experts = window_WE.shape[1]
    load_E: Loads = window_WE[chosen[:have]].sum(axis=0) + (0.0 if start_E is None else start_E)
    sum_W = window_WE.sum(axis=1)
    # `einsum`, not a product of BLAS: equal rows have equal scores to the last bit.
    square_W = square * np.einsum("we,we->w", window_WE, window_WE)
    own_W = square_W - 2 * level * sum_W - variance * sum_W * sum_W / experts
    given = set(chosen[:have].tolist())
    left = [w for w in range(len(window_WE)) if w not in given]
    for place in range(have, len(chosen)):
        among = np.array(left)
        if draws is not None and d < len(left):
            # The first d steps of a shuffle.
            for i, draw in enumerate(draws[(place - have) * d :][:d]):
                other = i + int(draw * (len(left) - i))
                left[i], left[other] = left[other], left[i]
            among = np.sort(left[:d])
        pull = 2 * variance * load_E.sum() / experts
        meets = np.einsum("we,e->w", window_WE[among], load_E)
        best = int(among[np.argmin(2 * meets + own_W[among] - pull * sum_W[among])])
        chosen[place] = best
        load_E += window_WE[best]
        left.remove(best)
    return load_E


class _Greedy(SelectionStrategy):
    """Least score of L + v (`choose_greedily`)."""

    _weights: ClassVar[Mapping[str, Any]] = {}

    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """See `SelectionStrategy`."""
        chosen = first(min(len(window_WE), batch_size))
        options = self._options(window_WE, batch_size, rng)
        choose_greedily(window_WE, context.running_E, chosen, 1, **self._weights, **options)
        return chosen

    def _options(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator
    ) -> dict[str, Any]:
        """Further arguments of `choose_greedily`."""
        return {}


class GreedyVariance(_Greedy):
    """Least Var(L + v): the objective of CAPS."""

    name = "greedy_variance"
    _weights: ClassVar = {"square": 1.0, "variance": 1.0}


class NormMinimizing(_Greedy):
    """Least |L + v|^2."""

    name = "norm_minimizing"
    _weights: ClassVar = {"square": 1.0}


class GreedyDotProduct(_Greedy):
    """Least v.L: the candidate with the least load on busy experts."""

    name = "greedy_dot_product"


class BestFit(_Greedy):
    """Least distance of L + v from the even load of a full batch of mean requests."""

    name = "best_fit"
    _weights: ClassVar = {"square": 1.0}

    def _options(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator
    ) -> dict[str, Any]:
        # The mean over the window is the mean per request and expert.
        return {"level": batch_size * float(window_WE.mean())}


class PowerOfD(GreedyVariance):
    """Least Var(L + v) of d candidates, drawn anew at each step. O(B d E).

    After "The Power of Two Choices in Randomized Load Balancing" (Mitzenmacher, 2001).

    Args:
        d: Candidates of a step.
    """

    name = "power_of_d"

    def __init__(self, d: int = 8) -> None:
        self.d = d

    def _options(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator
    ) -> dict[str, Any]:
        return {"draws": rng.random(self.d * batch_size), "d": self.d}


class PowerOfDDot(PowerOfD):
    """Least v.L of d candidates, drawn anew at each step. O(B d E)."""

    name = "power_of_d_dot"
    _weights: ClassVar = {}
