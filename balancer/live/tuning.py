"""Sets ScalpeLB's knobs while the balancer runs (`balancer.knobs: live`).

    signal        raises               lowers
    burstiness    k                                          spare replicas for experts that may turn hot
    link load                          budget                moves compete with other traffic for the link
    latency                            drift_tol, heavy_frac  near its target balance matters more than rest

burstiness   change of an expert's share of a layer's tokens from step to step, relative to that share; hot
             experts weigh most. Counting noise is subtracted, and drift does not count as a burst
link load    use of the network link of the busiest server machine, in its busier direction
latency      measured time between tokens over its target

Source: ScalpeLB, "Tuning in production", gives the knobs and the directions. The curves are ours: a straight
line between two points each (`knobs_for`). A signal takes effect after it has left the band around the
current value for three observations in a row, on one side, so that noise changes no knob.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from balancer.autoscaler.meters import LatencyMeter, Totals
from balancer.live.history import History
from balancer.live.hotness import Reading
from balancer.live.state import LoadState
from balancer.planner.layout import Layout
from eaas.log import get_logger
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Member

__all__ = ["CONFIRM", "Control", "LinkMeter", "Signals", "Tuning", "burstiness", "knobs_for"]

_log = get_logger(__name__)
_TokenTimes = Callable[[Iterable[Member]], Mapping[tuple[str, int], tuple[float, float]]]

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
        burstiness: 0 or more.
        link_load: Part of the link in use, 0 to 1; None: unknown.
        latency: Measured time between tokens over its target; None: no target, or no measurement.
    """

    burstiness: float
    link_load: float | None = None
    latency: float | None = None


class Tuning:
    """Runs ScalpeLB's control loop every few steps. Called from one thread.

    Args:
        layout: Holds the settings in force.
        history: Records changes of knobs.
        latency_target_ms: Target of the mean time between two tokens; 0: none.
        token_times: Reads clients' token times.
    """

    def __init__(
        self,
        layout: Layout,
        history: History,
        latency_target_ms: float,
        token_times: _TokenTimes,
    ) -> None:
        self._layout = layout
        self._history = history
        self._target_s = latency_target_ms / 1e3
        self._token_times = token_times
        self._links = LinkMeter()
        self._latency = LatencyMeter()
        self._control = Control()
        self._counted = 0
        self.signals: Signals | None = None
        """The latest observation; None: none yet."""

    def step(
        self, load: LoadState, readings: Mapping[str, Reading], clients: Iterable[Member]
    ) -> None:
        """After a step: every `load.recent` counted steps, observe, and set changed knobs for later plans."""
        window_WLE = load.tokens_WLE()
        if load.counted < self._counted + load.recent or window_WLE is None or len(window_WLE) < 2:
            return
        self._counted = load.counted
        settings = self._layout.settings
        rate = self._links.read({s: r.carried for s, r in readings.items()}, time.monotonic())
        token_s = self._latency.read(self._token_times(clients)) if self._target_s else None
        self.signals = Signals(
            burstiness=burstiness(window_WLE),
            link_load=None if rate is None else min(1.0, rate / settings.link_bytes_per_s),
            latency=None if token_s is None else token_s / self._target_s,
        )
        knobs, reasons = self._control.step(
            self.signals, spare_slots=settings.num_redundant_experts > 0
        )
        if settings.tuned == knobs:
            return
        self._layout.change(tuned=knobs)
        changes = [
            f"{name} {_shown(settings.tuned.get(name))} -> {_shown(value)}"
            for name, value in knobs.items()
            if settings.tuned.get(name) != value
        ]
        reason = f"{', '.join(changes)}: {'; '.join(reasons)}"
        _log.info("knobs: %s", reason)
        self._history.decided(
            pb.HistoryEntry(
                trigger="knobs",
                policy=settings.policy,
                verdict=pb.VERDICT_NOTHING,
                reason=reason,
                knobs=knobs,
            )
        )


def _shown(value: float | None) -> str:
    return "unset" if value is None else f"{value:g}"


class Control:
    """State of the control loop. A new one has observed nothing."""

    def __init__(self) -> None:
        # By signal: the value in effect, and the latest ones outside its band.
        self._values: dict[str, float | None] = dict.fromkeys(_SIGNALS)
        self._outside: dict[str, list[float]] = {name: [] for name in _SIGNALS}

    def step(
        self, seen: Signals, *, spare_slots: bool
    ) -> tuple[Mapping[str, float], tuple[str, ...]]:
        """Take an observation in; return the knobs, and a reason for each signal that now takes effect.

        Args:
            seen: The new observation.
            spare_slots: See `knobs_for`.
        """
        reasons = []
        for name, (_, _, words) in _SIGNALS.items():
            before, now = self._values[name], self._observe(name, getattr(seen, name))
            if before != now:
                after = "" if before is None else f", after {before:.2f}"
                reasons.append(words.format(now) + after)
        values = self._values
        used = Signals(values["burstiness"] or 0.0, values["link_load"], values["latency"])
        return knobs_for(used, spare_slots=spare_slots), tuple(reasons)

    def _observe(self, name: str, signal: float | None) -> float | None:
        """Take one signal in; return the value that is in effect now."""
        current, (band, part, _) = self._values[name], _SIGNALS[name]
        if signal is None:
            return current
        outside = self._outside[name]
        if current is not None and abs(signal - current) <= band + part * current:
            outside.clear()
        elif current is None:
            self._values[name] = signal
        else:
            if any((s > current) != (signal > current) for s in outside):
                outside.clear()
            outside.append(signal)
            if len(outside) == CONFIRM:
                # The smallest of the observed changes.
                self._values[name] = min(outside, key=lambda s: abs(s - current))
                outside.clear()
        return self._values[name]


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


def burstiness(window_WLE: npt.NDArray[np.number]) -> float:
    """Return the coefficient of variation of experts' shares from step to step, mean over layers; >= 0.

    Half the mean square of successive differences is the variance without drift (von Neumann, 1941). The
    sampling variance of n tokens, p (1 - p) / n, is subtracted.

    Args:
        window_WLE: Tokens by step, layer and expert. Steps in which a layer has no tokens are left out.
    """
    found = []
    for tokens_WE in window_WLE.swapaxes(0, 1):
        tokens_W = tokens_WE.sum(axis=1, dtype=np.float64)
        known_W = tokens_W > 0
        if known_W.sum() < 2:
            continue
        n_W = tokens_W[known_W]
        part_WE = tokens_WE[known_W] / n_W[:, None]
        mean_E = part_WE.mean(axis=0)
        variance = 0.5 * float((np.diff(part_WE, axis=0) ** 2).sum(axis=1).mean())
        noise = float((mean_E * (1 - mean_E)).sum() * (1 / n_W).mean())
        found.append(np.sqrt(max(0.0, variance - noise) / float(mean_E @ mean_E)))
    return float(np.mean(found)) if found else 0.0


class LinkMeter:
    """Turns the byte counters of expert servers' machines into the rate of the busiest machine."""

    def __init__(self) -> None:
        self._totals = Totals()

    def read(self, carried: Mapping[str, tuple[int, int]], now: float) -> float | None:
        """Return the busiest server machine's bytes per second since the last call, for the link load.

        None if no server has reported twice.

        Args:
            carried: Total bytes received and sent by each server's machine, by server.
            now: Monotonic seconds.
        """
        more = self._totals.since_last({s: (now, *totals) for s, totals in carried.items()})
        # If a counter falls, the server has moved to another machine.
        rates = (max(b) / s for s, *b in more if s > 0 and min(b) >= 0)
        return max(rates, default=None)
