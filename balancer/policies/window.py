"""What a window of observed loads says about the loads to plan for (ScalpeLB's planning weight).

weight = mean + K * std of the window; on layers whose traffic changed within it, of the window
weighted by a ramp towards its end.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from balancer.policies.types import Float

__all__ = ["planning_weight", "shift", "variance_buffer"]

# ScalpeLB's: std makes room for bursts where experts are many; where they are few and alike it only
# takes replicas from those that need them.
_MANY_EXPERTS, _K_MANY, _K_FEW = 192, 2.0, 0.0
# Steps converted at a time: few enough for a core's cache.
_BLOCK = 8

_Bool = npt.NDArray[np.bool_]


def variance_buffer(experts: int) -> float:
    """ScalpeLB's K for that many experts per layer."""
    return _K_MANY if experts >= _MANY_EXPERTS else _K_FEW


def shift(window_WLE: npt.NDArray[np.number]) -> Float:
    """float64 (L): total-variation distance of the loads in the window's halves, 0 to 1.

    0 where one of them has no load: nothing is known then.
    """
    half = len(window_WLE) // 2
    old_LE, new_LE = (
        part.sum(axis=0, dtype=np.float64) for part in (window_WLE[:half], window_WLE[half:])
    )
    return _total_variation(old_LE, new_LE)


def planning_weight(
    window_WLE: npt.NDArray[np.number], k: float | None = None, shift_tv: float = 0.2
) -> Float:
    """float64 (L, E): the loads to plan for.

    Args:
        window_WLE: (W, L, E), at least 0, oldest first.
        k: How many standard deviations to add to the mean; by number of experts by default.
        shift_tv: Layers whose halves differ by more than that are weighted towards the end.

    Time O(W * L * E).
    """
    window, _, experts = window_WLE.shape
    if k is None:
        k = variance_buffer(experts)
    half = window // 2
    old_LE, old2_LE = _moments(window_WLE[:half], np.ones(half))
    new_LE, new2_LE = _moments(window_WLE[half:], np.ones(window - half))
    weight_LE = _mean_and_std(old_LE + new_LE, old2_LE + new2_LE, window, k)
    shifted_L = np.flatnonzero(_total_variation(old_LE, new_LE) > shift_tv)
    if len(shifted_L):
        ramp_W = np.arange(1.0, window + 1)
        sum_NE, sum2_NE = _moments(window_WLE[:, shifted_L], ramp_W)
        weight_LE[shifted_L] = _mean_and_std(sum_NE, sum2_NE, float(ramp_W.sum()), k)
    return weight_LE


def _moments(window_WLE: npt.NDArray[np.number], ramp_W: Float) -> tuple[Float, Float]:
    """Sums over the window of loads and of their squares."""
    sum_LE, sum2_LE = np.zeros((2, *window_WLE.shape[1:]))
    for block_BLE, ramp_B in _blocks(window_WLE, ramp_W):
        sum_LE += np.tensordot(ramp_B, block_BLE, 1)
        sum2_LE += np.tensordot(ramp_B, block_BLE * block_BLE, 1)
    return sum_LE, sum2_LE


def _blocks(window_WLE: npt.NDArray[np.number], ramp_W: Float) -> Iterator[tuple[Float, Float]]:
    for first in range(0, len(window_WLE), _BLOCK):
        yield (
            window_WLE[first : first + _BLOCK].astype(np.float64),
            ramp_W[first : first + _BLOCK],
        )


def _mean_and_std(sum_LE: Float, sum2_LE: Float, total: float, k: float) -> Float:
    mean_LE: Float = sum_LE / total
    # Rounding can make the variance of a constant load negative.
    variance_LE = np.maximum(sum2_LE / total - mean_LE**2, 0.0)
    return mean_LE + k * np.sqrt(variance_LE)


def _total_variation(old_LE: Float, new_LE: Float) -> Float:
    old_L, new_L = old_LE.sum(axis=1), new_LE.sum(axis=1)
    known_L = (old_L > 0) & (new_L > 0)
    distance_L = np.zeros(len(old_L))
    distance_L[known_L] = 0.5 * np.abs(
        new_LE[known_L] / new_L[known_L, None] - old_LE[known_L] / old_L[known_L, None]
    ).sum(axis=1)
    return distance_L
