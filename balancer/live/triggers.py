"""When to plan again: at intervals, and when the load is no longer what was planned for. No I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eaas.words import counted

__all__ = ["Looked", "Triggers", "total_variation"]

Float = npt.NDArray[np.float64]

# Of a window: what the drift is looked for in. Few enough to see it soon, enough to be no chance.
_RECENT_PART = 8
_LEAST_RECENT = 3


@dataclass(frozen=True, eq=False)
class Looked:
    """What is known after a step.

    Attributes:
        recent_LE: float64; load of the last `Triggers.recent` steps.
        par: Mean PAR of the placement under that load.
        servers: S.
    """

    recent_LE: Float
    par: float
    servers: int


class Triggers:
    """Counts steps with tokens.

    Args:
        step_interval: Steps between two plans.
        window_size: Steps of the window.
        shift_tv: Total-variation distance to the load that was planned for, beyond chance, that is drift.
        drift_tolerance: By how much the PAR may be above what was planned.
    """

    def __init__(
        self, step_interval: int, window_size: int, shift_tv: float, drift_tolerance: float
    ) -> None:
        self._interval = step_interval
        self._shift_tv = shift_tv
        self.tolerance = drift_tolerance
        """As given; may be changed."""
        self.recent = max(_LEAST_RECENT, min(window_size, step_interval) // _RECENT_PART)
        """Steps in which drift is looked for."""
        self._since = 0
        self._planned: tuple[Float, float] | None = None

    def stepped(self, looked: Looked) -> tuple[str, str] | None:
        """A step with tokens is over.

        Returns:
            "interval" or "drift", and why; None: there is no reason to plan.
        """
        self._since += 1
        if self._since >= self._interval:
            return "interval", f"{counted(self._since, 'step')} since the last plan"
        if self._planned is None or self._since < self.recent:
            return None
        load_LE, par = self._planned
        far = total_variation(load_LE, looked.recent_LE)
        limit = self._shift_tv + _chance(load_LE) + _chance(looked.recent_LE)
        if far > limit:
            return "drift", f"the load is {far:.2f} (total variation) from what was planned for"
        tokens = float(looked.recent_LE.sum(axis=1).mean())
        noise = 2 * math.sqrt(looked.servers / max(tokens, 1.0))
        if looked.par > par + self.tolerance + noise:
            return "drift", f"PAR {looked.par:.2f}, {par:.2f} when it was planned"
        return None

    def planned(self, load_LE: Float, par: float) -> None:
        """There was a plan for this load, be it to do nothing; the placement's PAR is then that."""
        self._since = 0
        self._planned = load_LE, par

    def forget(self) -> None:
        """The placement is another one, for other reasons."""
        self._planned = None


def total_variation(one_LE: Float, other_LE: Float) -> float:
    """0 to 1: half the sum of differences of the experts' parts, mean over layers that have both loads."""
    one_L, other_L = one_LE.sum(axis=1), other_LE.sum(axis=1)
    both_L = (one_L > 0) & (other_L > 0)
    if not both_L.any():
        return 0.0
    parts = one_LE[both_L] / one_L[both_L, None] - other_LE[both_L] / other_L[both_L, None]
    return float(0.5 * np.abs(parts).sum(axis=1).mean())


def _chance(load_LE: Float) -> float:
    """The distance that samples of this size have on the average to what they are drawn from, at most."""
    tokens_L = load_LE.sum(axis=1)
    tokens_L = tokens_L[tokens_L > 0]
    if not tokens_L.size:
        return 1.0
    return float(0.5 * np.sqrt(load_LE.shape[1] / tokens_L).mean())
