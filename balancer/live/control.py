"""ScalpeLB's control loop, in the balancer: knobs by burstiness, link load and latency. Pure functions.

    signal        raises               lowers
    burstiness    k                                          spare replicas for experts that may turn hot
    link load                          budget                moves compete with other traffic for the link
    latency                            drift_tol, heavy_frac  near its target balance matters more than rest

Source: ScalpeLB, "Tuning in production", gives the knobs and the directions. The curves are ours: a straight
line between two points each (`knobs_for`). A signal takes effect after it has left the band around the
current value for three observations in a row, on one side, so that noise changes no knob.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

__all__ = ["CONFIRM", "Control", "Signals", "control", "knobs_for"]

CONFIRM = 3
"""Observations in a row that must agree before a signal takes effect."""

# By signal: width of its band, the part of the current value added to that width, and the reason's words.
_SIGNALS = {
    "burstiness": (0.03, 0.2, "the load's burstiness is {:.2f}"),
    "link_load": (0.1, 0.0, "links are {:.0%} full"),
    "latency": (0.1, 0.0, "tokens take {:.0%} of the target time"),
}


@dataclass(frozen=True)
class Signals:
    """One observation of the control loop's inputs.

    Attributes:
        burstiness: See `balancer.live.signals`; 0 or more.
        link_load: Part of the link in use, 0 to 1; None: unknown.
        latency: Measured time between tokens over its target; None: no target, or no measurement.
    """

    burstiness: float
    link_load: float | None = None
    latency: float | None = None


@dataclass(frozen=True)
class _Track:
    """State of one signal of the control loop: the value in effect, and the latest ones outside its band."""

    value: float | None = None
    outside: tuple[float, ...] = ()

    def observe(self, signal: float | None, band: float, part: float) -> _Track:
        current = self.value
        if signal is None:
            return self
        if current is None or abs(signal - current) <= band + part * current:
            return _Track(signal if current is None else current)
        one_side = all((s > current) == (signal > current) for s in self.outside)
        outside = (*(self.outside if one_side else ()), signal)
        if len(outside) < CONFIRM:
            return replace(self, outside=outside)
        # The smallest of the observed changes.
        return _Track(min(outside, key=lambda s: abs(s - current)))


@dataclass(frozen=True)
class Control:
    """State of the control loop. A new one has observed nothing."""

    tracks: Mapping[str, _Track] = field(default_factory=lambda: dict.fromkeys(_SIGNALS, _Track()))


def control(
    state: Control, seen: Signals, *, spare_slots: bool
) -> tuple[Control, Mapping[str, float], tuple[str, ...]]:
    """Take one step of the control loop; `Tuning` then puts the knobs in force.

    Args:
        state: State after the previous step.
        seen: The new observation.
        spare_slots: See `knobs_for`.

    Returns:
        The new state, the knobs, and a reason for each signal that has just taken effect.
    """
    then, reasons = {}, []
    for name, (band, part, words) in _SIGNALS.items():
        track = state.tracks[name]
        then[name] = track.observe(getattr(seen, name), band, part)
        before, now = track.value, then[name].value
        if before != now:
            reasons.append(words.format(now) + ("" if before is None else f", after {before:.2f}"))
    used = Signals(then["burstiness"].value or 0.0, then["link_load"].value, then["latency"].value)
    return Control(then), knobs_for(used, spare_slots=spare_slots), tuple(reasons)


def knobs_for(signals: Signals, *, spare_slots: bool) -> Mapping[str, float]:
    """Compute ScalpeLB's knobs (`policies.scalpel`) by name; each is monotone in its signal.

    Args:
        signals: The signals to use. An unknown one leaves its knobs at the policy's defaults.
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
    """Interpolate a knob linearly between two points, constant beyond them."""
    return float(np.interp(signal, ends, values))
