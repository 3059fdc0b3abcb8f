"""ScalpeLB's control loop: knobs from burstiness, link load and latency. Pure functions.

    signal        raises               lowers
    burstiness    k                                          spare replicas for experts that may turn hot
    link load                          budget                moves compete with other traffic for the link
    latency                            drift_tol, heavy_frac  near its target balance matters more than rest

Source: ScalpeLB, "Tuning in production", gives the knobs and the directions. The curves are ours: a straight
line between two points each (`knobs_for`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["Signals", "knobs_for", "steady"]


@dataclass(frozen=True)
class Signals:
    """One observation.

    Attributes:
        burstiness: See `signals`; 0 or more.
        link_load: Part of the link in use, 0 to 1; None: unknown.
        latency: Measured over target; None: no target, or no measurement.
    """

    burstiness: float
    link_load: float | None = None
    latency: float | None = None


def steady(used: Signals | None, seen: Signals) -> Signals:
    """The signals to use: those in use, except where the observation has left the band around them."""
    if used is None:
        return seen

    def either(old: float | None, new: float | None, band: float) -> float | None:
        stays = new is None or (old is not None and abs(new - old) <= band)
        return old if stays else new

    band = 0.03 + 0.2 * used.burstiness
    return Signals(
        either(used.burstiness, seen.burstiness, band) or 0.0,
        either(used.link_load, seen.link_load, 0.1),
        either(used.latency, seen.latency, 0.1),
    )


def knobs_for(signals: Signals, *, spare_slots: bool) -> Mapping[str, float]:
    """ScalpeLB's knobs (`policies.scalpel`) by name; each is monotone in its signal.

    Args:
        signals: Those to use. An unknown one leaves its knobs at the policy's defaults.
        spare_slots: Whether there are replicas beyond one of each expert; if not, `k` is 0.
    """
    k = _line(signals.burstiness, (0.05, 0.35), (0.0, 2.0)) if spare_slots else 0.0
    knobs = {"k": round(k, 2), "budget": 8, "drift_tol": 0.2, "heavy_frac": 0.5}
    if signals.link_load is not None:
        knobs["budget"] = round(_line(signals.link_load, (0.2, 0.8), (10, 1)))
    if signals.latency is not None:
        knobs["drift_tol"] = round(_line(signals.latency, (0.5, 1.0), (0.4, 0.05)), 3)
        knobs["heavy_frac"] = round(_line(signals.latency, (0.5, 1.0), (0.75, 0.25)), 2)
    return knobs


def _line(signal: float, ends: tuple[float, float], values: tuple[float, float]) -> float:
    """The straight line between two points, level beyond them."""
    return float(np.interp(signal, ends, values))
