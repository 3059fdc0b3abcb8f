"""Means over parts of a window of loads, for forecasts and for plans of all its iterations.

Shape suffixes: W window, N blocks, T parts, L layers, E logical experts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from balancer.policies import compiled
from balancer.policies.types import Float

__all__ = ["BLOCKS", "MEANS", "History", "Means", "window_means"]

Means = npt.NDArray[np.float32]

BLOCKS = 16
"""Number of blocks in a window."""

MEANS = 128
"""Most means that a plan considers."""

# Most parts of a block.
_PARTS = 4


def window_means(window_WLE: npt.NDArray[np.number]) -> tuple[Means, Float]:
    """Average a window, in one pass over it.

    Returns:
        float32 (L, T, E): means over even parts of the blocks, at most 4 of each, oldest first.
        float64 (N, L, E): means of `BLOCKS` even blocks of the window, or of single iterations.
    """
    iterations, layers, experts = window_WLE.shape
    blocks = min(BLOCKS, iterations)
    shortest = iterations // blocks
    parts = shortest // -(-shortest // _PARTS)
    edge_N = np.linspace(0, iterations, blocks + 1).astype(np.int64)
    within_NT = np.diff(edge_N)[:, None] * np.arange(parts) // parts
    first_X = np.append((edge_N[:-1, None] + within_NT).ravel(), iterations)
    mean_LTE = np.empty((layers, blocks * parts, experts), np.float32)
    block_NLE = np.empty((blocks, layers, experts))
    kind = window_WLE.dtype.name
    if kind not in compiled.window_means:
        kind = "float64"
    compiled.window_means[kind](
        np.ascontiguousarray(window_WLE, kind), first_X, mean_LTE, block_NLE
    )
    return mean_LTE, block_NLE


class History:
    """The means of the last windows, averaged to at most `MEANS` together."""

    def __init__(self, windows: int) -> None:
        self._windows = windows
        self._means: list[Means] = []
        # Means of a window that one of these averages.
        self._length = 1

    def add(self, mean_LTE: Means) -> None:
        """Add the means of the newest window; those of the same number and shape as before."""
        self._means = [*self._means, _averaged(mean_LTE, self._length)][-self._windows :]
        while sum(load_LTE.shape[1] for load_LTE in self._means) > MEANS:
            self._length *= 2
            self._means = [_averaged(load_LTE, 2) for load_LTE in self._means]

    def joined(self) -> Means:
        """float32 (L, T, E): all means, oldest first."""
        return self._means[0] if len(self._means) == 1 else np.concatenate(self._means, axis=1)


def _averaged(load_LTE: Means, length: int) -> Means:
    """Average every few means, less the oldest left over; all, if there are fewer."""
    count = load_LTE.shape[1]
    length = min(length, count)
    if length == 1:
        return load_LTE
    used = load_LTE[:, count % length :]
    total = used[:, ::length].copy()
    for n in range(1, length):
        total += used[:, n::length]
    total *= np.float32(1 / length)
    return total
