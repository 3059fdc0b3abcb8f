"""Predictors of a layer's next load, to compare: from the last loads, or knowing it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.placement.sparing import Predictor, last_loads

__all__ = ["PREDICTORS"]

Counts = npt.NDArray[np.generic]


def _exact(counts_ILE: Counts) -> Predictor:
    """Know the next load, as a router's dry run would at best; the last call predicts nothing."""

    def predict(calls: int, layer: int) -> npt.NDArray[np.float64] | None:
        if calls == len(counts_ILE):
            return None
        return counts_ILE[calls : calls + 1, layer].astype(np.float64)

    return predict


def _of_last(
    reduce: Callable[..., npt.NDArray[Any]], scenarios: int
) -> Callable[[Counts], Predictor]:
    def make(counts_ILE: Counts) -> Predictor:
        def predict(calls: int, layer: int) -> npt.NDArray[np.float64]:
            last_BE = counts_ILE[max(0, calls - scenarios) : calls, layer]
            return reduce(last_BE.astype(np.float64), axis=0, keepdims=True)

        return predict

    return make


def _averaged(part: float) -> Callable[[Counts], Predictor]:
    """Average with exponential weights, the last load's weight `part`. Calls must come in order."""

    def make(counts_ILE: Counts) -> Predictor:
        sum_LE = np.zeros(counts_ILE.shape[1:])
        weight_L = np.zeros(counts_ILE.shape[1])

        def predict(calls: int, layer: int) -> npt.NDArray[np.float64]:
            sum_LE[layer] += part * (counts_ILE[calls - 1, layer] - sum_LE[layer])
            weight_L[layer] += part * (1 - weight_L[layer])
            return np.asarray(sum_LE[layer : layer + 1] / weight_L[layer])

        return predict

    return make


PREDICTORS: dict[str, Callable[[Counts], Predictor]] = {
    "the last load": lambda counts: last_loads(counts, 1),
    "the last 4": lambda counts: last_loads(counts, 4),
    "the last 8": last_loads,
    "the last 16": lambda counts: last_loads(counts, 16),
    "mean of the last 8": _of_last(np.mean, 8),
    "maximum of the last 8": _of_last(np.max, 8),
    "EWMA, 1/10": _averaged(0.1),
    "EWMA, 1/32": _averaged(1 / 32),
    "the next load": _exact,
}
"""Each with several loads has them as scenarios, except for the means and the maximum, which are one load."""
