"""ScalpeLB's control loop: knobs from burstiness, link load and latency. Pure functions.

    signal        raises               lowers
    burstiness    k                                          spare replicas for experts that may turn hot
    link load                          budget                moves compete with other traffic for the link
    latency                            drift_tol, heavy_frac  near its target balance matters more than rest

Source: ScalpeLB, "Tuning in production", gives the knobs and the directions. The curves are ours: a straight
line between two points each (`knobs_for`). A signal takes effect after it has left the band around the
current value for three observations in a row, on one side; so noise changes no knob.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["CONFIRM", "STATIC", "Control", "Knobs", "Signals", "control", "knobs_for"]

CONFIRM = 3
"""Observations in a row that must agree before a signal takes effect."""


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


@dataclass(frozen=True)
class Knobs:
    """ScalpeLB's knobs (`policies.scalpel`).

    Attributes:
        k: Standard deviations on top of the mean, 0 to 2.
        budget: Swaps per layer, 1 to 10.
        drift_tol: 0.05 to 0.4.
        heavy_frac: 0.25 to 0.75.
    """

    k: float
    budget: int
    drift_tol: float
    heavy_frac: float


STATIC = Knobs(k=0.0, budget=8, drift_tol=0.2, heavy_frac=0.5)
"""The policy's defaults (`k`: for few experts), used for a signal that is unknown."""


@dataclass(frozen=True)
class _Line:
    """From `low` (at a signal of `begin` or less) to `high` (at `end` or more)."""

    begin: float
    end: float
    low: float
    high: float

    def at(self, signal: float) -> float:
        part = min(1.0, max(0.0, (signal - self.begin) / (self.end - self.begin)))
        return self.low + part * (self.high - self.low)


_K = _Line(0.05, 0.35, 0.0, 2.0)
_BUDGET = _Line(0.2, 0.8, 10.0, 1.0)
_DRIFT_TOL = _Line(0.5, 1.0, 0.4, 0.05)
_HEAVY_FRAC = _Line(0.5, 1.0, 0.75, 0.25)


@dataclass(frozen=True)
class _Track:
    """One signal: the value in effect, and the latest values outside its band."""

    value: float | None = None
    outside: tuple[float, ...] = ()

    def observe(self, signal: float | None, band: float, part: float) -> _Track:
        if signal is None:
            return self
        current = self.value
        if current is None:
            return _Track(signal)
        if abs(signal - current) <= band + part * current:
            return _Track(current)
        one_side = all((s > current) == (signal > current) for s in self.outside)
        outside = (*(self.outside if one_side else ()), signal)
        if len(outside) < CONFIRM:
            return replace(self, outside=outside)
        # The smallest of the observed changes.
        return _Track(min(outside, key=lambda s: abs(s - current)))


@dataclass(frozen=True)
class Control:
    """State of the loop. A new one has observed nothing."""

    burstiness: _Track = _Track()
    link_load: _Track = _Track()
    latency: _Track = _Track()


def control(
    state: Control, seen: Signals, *, spare_slots: bool
) -> tuple[Control, Knobs, tuple[str, ...]]:
    """One step of the loop.

    Args:
        state: From the step before.
        seen: The new observation.
        spare_slots: Whether there are replicas beyond one of each expert; if not, `k` stays 0.

    Returns:
        State, knobs, and a reason for each signal that has just taken effect.
    """
    then = Control(
        burstiness=state.burstiness.observe(seen.burstiness, 0.03, 0.2),
        link_load=state.link_load.observe(seen.link_load, 0.1, 0.0),
        latency=state.latency.observe(seen.latency, 0.1, 0.0),
    )
    reasons = []
    for name, words in (
        ("burstiness", "the load's burstiness is {:.2f}"),
        ("link_load", "links are {:.0%} full"),
        ("latency", "tokens take {:.0%} of the target time"),
    ):
        before, now = getattr(state, name).value, getattr(then, name).value
        if before != now:
            was = "" if before is None else f", after {before:.2f}"
            reasons.append(words.format(now) + was)
    signals = Signals(then.burstiness.value or 0.0, then.link_load.value, then.latency.value)
    return then, knobs_for(signals, spare_slots=spare_slots), tuple(reasons)


def knobs_for(signals: Signals, *, spare_slots: bool) -> Knobs:
    """The knobs for these signals; each knob is monotone in its signal."""
    knobs = STATIC
    if spare_slots:
        knobs = replace(knobs, k=round(_K.at(signals.burstiness), 2))
    if signals.link_load is not None:
        knobs = replace(knobs, budget=round(_BUDGET.at(signals.link_load)))
    if signals.latency is not None:
        knobs = replace(
            knobs,
            drift_tol=round(_DRIFT_TOL.at(signals.latency), 3),
            heavy_frac=round(_HEAVY_FRAC.at(signals.latency), 2),
        )
    return knobs
