"""Decides when the balancer plans again: at intervals, and when the load drifts from the planned. No I/O."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from balancer.policies.window import total_variation as by_layer
from eaas.counted import counted

__all__ = ["Triggers", "total_variation"]

Float = npt.NDArray[np.float64]

# Total-variation distance to the planned load, beyond sampling noise, that counts as drift.
_DRIFT_TV = 0.2
# Accepted rise of the PAR above the planned one.
_DRIFT_TOLERANCE = 0.2
# Drift is measured over a window divided by this: short enough to see drift soon, long enough to average
# noise out.
_RECENT_PART = 8
_LEAST_RECENT = 3


class Triggers:
    """Counts steps with tokens, and compares their load with the planned one.

    Args:
        step_interval: Steps between two plans.
        window_size: Number of steps in the window.
    """

    def __init__(self, step_interval: int, window_size: int) -> None:
        self._interval = step_interval
        self.recent = max(_LEAST_RECENT, min(window_size, step_interval) // _RECENT_PART)
        """Number of steps over which drift is measured."""
        self._since = 0
        self._planned: tuple[Float, float] | None = None

    def stepped(self, recent_LE: Float, par: float, servers: int) -> tuple[str, str] | None:
        """Count a step with tokens, and decide whether the rebalancer should plan now.

        Args:
            recent_LE: float64; load of the last `recent` steps.
            par: Mean PAR of the placement under that load.
            servers: Number of servers.

        Returns:
            "interval" or "drift", and the reason; None: no reason to plan.
        """
        self._since += 1
        if self._since >= self._interval:
            return "interval", f"{counted(self._since, 'step')} since the last plan"
        if self._planned is None or self._since < self.recent:
            return None
        load_LE, planned_par = self._planned
        far = total_variation(load_LE, recent_LE)
        limit = _DRIFT_TV + _chance(load_LE) + _chance(recent_LE)
        if far > limit:
            return "drift", f"the load is {far:.2f} (total variation) from the planned load"
        tokens = float(recent_LE.sum(axis=1).mean())
        noise = 2 * math.sqrt(servers / max(tokens, 1.0))
        if par > planned_par + _DRIFT_TOLERANCE + noise:
            return "drift", f"PAR {par:.2f}, {planned_par:.2f} when it was planned"
        return None

    def planned(self, load_LE: Float, par: float) -> None:
        """Restart the interval, and measure drift from a plan's load and PAR, even if it changed nothing."""
        self._since = 0
        self._planned = load_LE, par


def total_variation(one_LE: Float, other_LE: Float) -> float:
    """Return the total-variation distance of two loads, 0 to 1: mean over layers with tokens in both."""
    both_L = one_LE.any(axis=1) & other_LE.any(axis=1)
    return float(by_layer(one_LE, other_LE)[both_L].mean()) if both_L.any() else 0.0


def _chance(load_LE: Float) -> float:
    """Bound the mean distance between a sample of this size and its distribution: noise, not drift."""
    tokens_L = load_LE.sum(axis=1)
    tokens_L = tokens_L[tokens_L > 0]
    if not tokens_L.size:
        return 1.0
    return float(0.5 * np.sqrt(load_LE.shape[1] / tokens_L).mean())
