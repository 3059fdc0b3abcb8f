"""The control loop: knobs from the load's burstiness, the links' load and the latency. Pure functions.

    signal        turned up by it      turned down by it
    burstiness    k                                          room for experts that are about to be hot
    link load                          budget, link          what is moved competes with others for the link
    latency                            drift_tol, heavy_frac  near its target balance counts, far from it rest

Source: ScalpeLB, "Tuning in production", which names the knobs and the directions. The curves are ours:
straight lines between two points each (`knobs_for`). A signal is followed when it has left the band around
the value that is in use three times running, on one side; so knobs rest while it does, and in noise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["CONFIRM", "STATIC", "Control", "Knobs", "Signals", "control", "knobs_for"]

CONFIRM = 3
"""Looks in a row that have to say the same before it is followed."""


@dataclass(frozen=True)
class Signals:
    """What was seen.

    Attributes:
        burstiness: See `signals`; 0 or more.
        link_load: Part of the link that is in use, 0 to 1; None: not known.
        latency: Measured over wanted; None: no target, or nothing was measured.
    """

    burstiness: float
    link_load: float | None = None
    latency: float | None = None


@dataclass(frozen=True)
class Knobs:
    """ScalpeLB's (`policies.scalpel`), and the part of the link that loads may count on.

    Attributes:
        k: Standard deviations on top of the mean, 0 to 2.
        budget: Swaps per layer, 1 to 10.
        drift_tol: 0.05 to 0.4. The trigger by drift is in proportion.
        heavy_frac: 0.25 to 0.75.
        link_part: 0.05 to 1.
    """

    k: float
    budget: int
    drift_tol: float
    heavy_frac: float
    link_part: float

    def scalpel(self) -> dict[str, float]:
        """Those of the policy, by name."""
        return {
            "k": self.k,
            "budget": self.budget,
            "drift_tol": self.drift_tol,
            "heavy_frac": self.heavy_frac,
        }


STATIC = Knobs(k=0.0, budget=8, drift_tol=0.2, heavy_frac=0.5, link_part=1.0)
"""Where a signal is not known: what the policy does by itself (`k`: with few experts)."""


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
_LINK_PART = _Line(0.0, 0.95, 1.0, 0.05)
_DRIFT_TOL = _Line(0.5, 1.0, 0.4, 0.05)
_HEAVY_FRAC = _Line(0.5, 1.0, 0.75, 0.25)


@dataclass(frozen=True)
class _Track:
    """One signal: the value in use, and what was outside of its band since."""

    value: float | None = None
    outside: tuple[float, ...] = ()

    def seen(self, signal: float | None, band: float, part: float) -> _Track:
        if signal is None:
            return self
        if self.value is None:
            return _Track(signal)
        width = band + part * self.value
        if abs(signal - self.value) <= width:
            return _Track(self.value)
        same_side = [s for s in self.outside if (s > self.value) == (signal > self.value)]
        outside = (*(self.outside if len(same_side) == len(self.outside) else ()), signal)
        if len(outside) < CONFIRM:
            return replace(self, outside=outside)
        # The least change of those that were seen.
        return _Track(min(outside, key=lambda s: abs(s - self.value)))  # type: ignore[operator]


@dataclass(frozen=True)
class Control:
    """What the loop remembers. A new one knows nothing."""

    burstiness: _Track = _Track()
    link_load: _Track = _Track()
    latency: _Track = _Track()


def control(
    state: Control, seen: Signals, *, spare_slots: bool
) -> tuple[Control, Knobs, tuple[str, ...]]:
    """One look.

    Args:
        state: From the look before.
        seen: What was seen.
        spare_slots: Whether there is a replica beyond one of each expert; without one `k` stays 0.

    Returns:
        State, knobs, and for each signal that is followed from now on: what for, for people.
    """
    then = Control(
        burstiness=state.burstiness.seen(seen.burstiness, 0.03, 0.2),
        link_load=state.link_load.seen(seen.link_load, 0.1, 0.0),
        latency=state.latency.seen(seen.latency, 0.1, 0.0),
    )
    reasons = []
    for name, words in (
        ("burstiness", "the load's burstiness is {:.2f}"),
        ("link_load", "links are {:.0%} full"),
        ("latency", "tokens take {:.0%} of the time that they may"),
    ):
        before, now = getattr(state, name).value, getattr(then, name).value
        if before != now:
            was = "" if before is None else f", after {before:.2f}"
            reasons.append(words.format(now) + was)
    return then, knobs_for(_in_use(then), spare_slots=spare_slots), tuple(reasons)


def knobs_for(signals: Signals, *, spare_slots: bool) -> Knobs:
    """The knobs for signals that are followed; each is monotone in its own."""
    knobs = STATIC
    if spare_slots:
        knobs = replace(knobs, k=round(_K.at(signals.burstiness), 2))
    if signals.link_load is not None:
        knobs = replace(
            knobs,
            budget=round(_BUDGET.at(signals.link_load)),
            link_part=round(_LINK_PART.at(signals.link_load), 2),
        )
    if signals.latency is not None:
        knobs = replace(
            knobs,
            drift_tol=round(_DRIFT_TOL.at(signals.latency), 3),
            heavy_frac=round(_HEAVY_FRAC.at(signals.latency), 2),
        )
    return knobs


def _in_use(state: Control) -> Signals:
    return Signals(state.burstiness.value or 0.0, state.link_load.value, state.latency.value)
