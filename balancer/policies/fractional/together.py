"""The policy `fractional` for layers whose experts' loads move together again and again, as with topics.

A forecast of each expert's mean says nothing about which experts peak in the same iterations. Layers where
that matters are planned for all iterations of the window (means of a few), by the objective of `together.c`.
Shape suffixes: N blocks, W window, T means, L layers, E logical experts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from balancer.policies.fractional.window import parts_of
from balancer.policies.types import Float

__all__ = ["GAIN_PART", "anew_factor", "returns"]

Bool = npt.NDArray[np.bool_]

GAIN_PART = 0.19
"""Part of the least gain that a load needs here: over many iterations a gain is less often noise."""

# A step between blocks is movement if its square, in units of noise and mean over experts, is above this.
_ABOVE_NOISE = 4.0
# No expert counts more than this many standard deviations.
_MOST_STEP = 5.0
_LEAST_NOISE, _ROUNDING = 0.1, 1e-9
# Movement that turned back so often in the known blocks will go on.
_TURNS = 4
# Iterations of a window from which on the price of a layout from nothing is that of other loads.
_LONG = 1024


def returns(blocks_NLE: Float, variance_LE: Float, length: float) -> Bool:
    """Find the layers whose loads move to and fro: bool (L).

    A drift goes on in one direction, and a change of traffic happens once; the forecast follows both. Loads
    that move together with topics turn back: a step between blocks and the next, both above the noise, have a
    negative product.

    Args:
        blocks_NLE: Known blocks, oldest first.
        variance_LE: `window.noise`.
        length: Iterations in a block.
    """
    # In units of noise all experts count alike. That of an expert that few tokens choose is not known well.
    least_L1 = _LEAST_NOISE * variance_LE.mean(axis=1, keepdims=True) + _ROUNDING
    units_LE = 1 / np.sqrt(2 / length * (variance_LE + least_L1))
    turns_L = np.zeros(len(variance_LE), np.int64)
    last_LE = np.zeros(variance_LE.shape)
    # Block by block: all at once would not fit into a processor's cache.
    before_LE = parts_of(blocks_NLE[0])
    for block_LE in blocks_NLE[1:]:
        now_LE = parts_of(block_LE)
        step_LE = (now_LE - before_LE) * units_LE
        np.clip(step_LE, -_MOST_STEP, _MOST_STEP, out=step_LE)
        before_LE = now_LE
        moved_L = np.einsum("le,le->l", step_LE, step_LE) > _ABOVE_NOISE * step_LE.shape[1]
        turns_L += moved_L & (np.einsum("le,le->l", step_LE, last_LE) < 0)
        last_LE = np.where(moved_L[:, None], step_LE, last_LE)
    return np.asarray(turns_L >= _TURNS)


def anew_factor(iterations: int) -> float:
    """Return how many times their price the loads of a layout from nothing must pay, by the window's length.

    A short window says less, and with frequent plans there are many such layouts.
    """
    return max(1.0, _LONG / iterations)
