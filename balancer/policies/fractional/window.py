"""Means over parts of a window of loads, for forecasts and for plans of all its iterations.

Shape suffixes: W window, N blocks, T parts, L layers, E logical experts.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from balancer.policies.types import Float

__all__ = ["BLOCKS", "MEANS", "Means", "Windows", "noise", "parts_of", "window_means"]

Means = npt.NDArray[np.float32]

BLOCKS = 16
"""Number of blocks in a window."""

MEANS = 128
"""Most means that a plan considers."""

# Most parts of a block.
_PARTS = 4
# Pairs of iterations that show the noise.
_PAIRS = 16
_WINDOWS_KEPT = 3
_WINDOWS_OF_MEANS = 5


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
    block_NLE = np.zeros((blocks, layers, experts))
    for part, (begin, end) in enumerate(pairwise(first_X.tolist())):
        # Some iterations at a time: a converted window would not fit into a processor's cache.
        sum_LE = window_WLE[begin:end].astype(np.float32).sum(axis=0)
        block_NLE[part // parts] += sum_LE
        mean_LTE[:, part] = sum_LE / np.float32(end - begin)
    block_NLE /= np.diff(edge_N)[:, None, None]
    return mean_LTE, block_NLE


def noise(window_WLE: npt.NDArray[np.number]) -> Float:
    """float64 (L, E): variance of a part of the load from one iteration to the next, from some pairs."""
    first = np.unique(np.linspace(0, max(0, len(window_WLE) - 2), _PAIRS).astype(np.int64))
    after = np.minimum(first + 1, len(window_WLE) - 1)
    total_LE = np.zeros(window_WLE.shape[1:])
    # Pair by pair: all at once would not fit into a processor's cache.
    for one, two in zip(first.tolist(), after.tolist(), strict=True):
        step_LE = parts_of(window_WLE[two]) - parts_of(window_WLE[one])
        total_LE += step_LE**2
    return np.asarray(total_LE / (2 * len(first)))


def parts_of(load_XE: npt.NDArray[np.number]) -> Float:
    """Compute loads over their mean, along the last axis; 0 without load."""
    mean_X1 = load_XE.mean(axis=-1, keepdims=True, dtype=np.float64)
    return np.asarray(load_XE * np.where(mean_X1 > 0, 1 / np.where(mean_X1 > 0, mean_X1, 1), 0))


class Windows:
    """The last windows of loads, as far as plans for the next one need them.

    Attributes:
        last_WLE: The newest window.
        blocks_NLE: float64 (N, L, E): blocks of the last windows of its length, oldest first.
        ahead: Number of blocks in a window.
    """

    def __init__(self) -> None:
        self.last_WLE: npt.NDArray[np.number] = np.empty((0, 0, 0))
        self.blocks_NLE: Float = np.empty((0, 0, 0))
        self.ahead = 0
        self._means: list[Means] = []
        self._noise: list[Float] = []
        # Means of a window that one of these averages.
        self._length = 1

    def add(self, window_WLE: npt.NDArray[np.number]) -> None:
        """Add the newest window, (W, L, E). It continues the series only if it is as long as those before."""
        if window_WLE.shape != self.last_WLE.shape:
            self.blocks_NLE = np.empty((0, *window_WLE.shape[1:]))
            self._means, self._noise, self._length = [], [], 1
        mean_LTE, block_NLE = window_means(window_WLE)
        self.last_WLE, self.ahead = window_WLE, len(block_NLE)
        known_NLE = np.concatenate([self.blocks_NLE, block_NLE])
        self.blocks_NLE = known_NLE[-(_WINDOWS_KEPT + 1) * self.ahead :]
        self._noise = [*self._noise, noise(window_WLE)][-_WINDOWS_KEPT:]
        self._means = [*self._means, _averaged(mean_LTE, self._length)][-_WINDOWS_OF_MEANS:]
        while sum(load_LTE.shape[1] for load_LTE in self._means) > MEANS:
            self._length *= 2
            self._means = [_averaged(load_LTE, 2) for load_LTE in self._means]

    @property
    def noise_LE(self) -> Float:
        """float64 (L, E): `noise`, mean over the windows."""
        return np.asarray(np.mean(self._noise, axis=0))

    @property
    def means_LTE(self) -> Means:
        """float32 (L, T, E): means over a few iterations, at most `MEANS`, oldest first."""
        return np.concatenate(self._means, axis=1)


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
