"""ScalpeLB's planning weight: computes the loads to plan for from a window of observed loads.

weight = mean + K * std of the window. On layers whose traffic shifted within the window, later steps weigh
more, by a linear ramp.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from balancer.policies.types import Float

__all__ = ["planning_weight", "shift", "total_variation", "variance_buffer"]

# ScalpeLB's values of K. With many experts, the std provisions for bursts; with few, similar experts it only
# takes replicas from those that need them.
_MANY_EXPERTS, _K_MANY, _K_FEW = 192, 2.0, 0.0
# Steps converted at a time, few enough for a core's cache.
_BLOCK = 8


def total_variation(one_LE: npt.ArrayLike, other_LE: npt.ArrayLike) -> Float:
    """float64 (L): half the sum of absolute differences of two loads' shares, 0 (equal) to 1 (disjoint).

    0 if one of the loads is empty.
    """
    one, other = (np.asarray(load, dtype=np.float64) for load in (one_LE, other_LE))
    one_L1, other_L1 = (load.sum(axis=1, keepdims=True) for load in (one, other))
    known_L = ((one_L1 > 0) & (other_L1 > 0))[:, 0]
    distance_L = np.zeros(len(one))
    apart_NE = one[known_L] / one_L1[known_L] - other[known_L] / other_L1[known_L]
    distance_L[known_L] = 0.5 * np.abs(apart_NE).sum(axis=1)
    return distance_L


def variance_buffer(experts: int) -> float:
    """Return ScalpeLB's K (standard deviations on top of the mean) for this number of experts per layer."""
    return _K_MANY if experts >= _MANY_EXPERTS else _K_FEW


def shift(window_WLE: npt.NDArray[np.number]) -> Float:
    """float64 (L): total-variation distance of the window's halves, 0 to 1; 0 if a half is empty."""
    half = len(window_WLE) // 2
    old_LE, new_LE = (
        part.sum(axis=0, dtype=np.float64) for part in (window_WLE[:half], window_WLE[half:])
    )
    return total_variation(old_LE, new_LE)


def planning_weight(
    window_WLE: npt.NDArray[np.number], k: float | None = None, shift_tv: float = 0.2
) -> Float:
    """float64 (L, E): the planning weight of each expert.

    Args:
        window_WLE: (W, L, E), at least 0, oldest first.
        k: Standard deviations to add to the mean; by default from the number of experts.
        shift_tv: Layers whose halves differ by more than this are weighted towards the end.

    Time O(W * L * E).
    """
    window, _, experts = window_WLE.shape
    if k is None:
        k = variance_buffer(experts)
    half = window // 2
    old_LE, old2_LE = _moments(window_WLE[:half], np.ones(half))
    new_LE, new2_LE = _moments(window_WLE[half:], np.ones(window - half))
    weight_LE = _mean_and_std(old_LE + new_LE, old2_LE + new2_LE, window, k)
    shifted_L = np.flatnonzero(total_variation(old_LE, new_LE) > shift_tv)
    if len(shifted_L):
        ramp_W = np.arange(1.0, window + 1)
        sum_NE, sum2_NE = _moments(window_WLE[:, shifted_L], ramp_W)
        weight_LE[shifted_L] = _mean_and_std(sum_NE, sum2_NE, float(ramp_W.sum()), k)
    return weight_LE


def _moments(window_WLE: npt.NDArray[np.number], ramp_W: Float) -> tuple[Float, Float]:
    """Sum the loads and their squares over the window, each step weighted by the ramp."""
    sum_LE, sum2_LE = np.zeros((2, *window_WLE.shape[1:]))
    for first in range(0, len(window_WLE), _BLOCK):
        ramp_B = ramp_W[first : first + _BLOCK]
        block_BLE = window_WLE[first : first + _BLOCK].astype(np.float64)
        sum_LE += np.tensordot(ramp_B, block_BLE, 1)
        sum2_LE += np.tensordot(ramp_B, block_BLE * block_BLE, 1)
    return sum_LE, sum2_LE


def _mean_and_std(sum_LE: Float, sum2_LE: Float, total: float, k: float) -> Float:
    mean_LE: Float = sum_LE / total
    # Rounding can make the variance of a constant load negative.
    variance_LE = np.maximum(sum2_LE / total - mean_LE**2, 0.0)
    return mean_LE + k * np.sqrt(variance_LE)
