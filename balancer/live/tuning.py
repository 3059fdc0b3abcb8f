"""When knobs are looked at, and who is told: the edges of `tuner`.

window, links' counters, endpoints' metrics --> Tuner --> settings in force, drift trigger, history
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from balancer.autoscaler.meters import LatencyMeter
from balancer.live.control import Signals
from balancer.live.history import History
from balancer.live.hotness import Reading
from balancer.live.signals import LinkMeter, burstiness
from balancer.live.state import LiveLayout, LoadState
from balancer.live.tuner import Looked, Tuned, Tuner
from eaas.config import BalancerConfig
from eaas.log import get_logger
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Member

__all__ = ["Tuning"]

_log = get_logger(__name__)
_Counted = Mapping[tuple[str, int], tuple[float, float]]


class Tuning:
    """Has a tuner look every few steps. To be called from one thread.

    Args:
        config: The balancer's settings.
        layout: Has the settings in force.
        history: Told of changes.
        tuner: Sets knobs.
        token_times: Asks clients for the times of their tokens.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        config: BalancerConfig,
        layout: LiveLayout,
        history: History,
        tuner: Tuner,
        token_times: Callable[[Iterable[Member]], _Counted],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._layout = layout
        self._history = history
        self._tuner = tuner
        self._token_times = token_times
        self._clock = clock
        self._links = LinkMeter()
        self._latency = LatencyMeter()
        self._looked_at = 0
        self.signals: Signals | None = None
        """The last that were seen."""

    def look(
        self, load: LoadState, readings: Mapping[str, Reading], clients: Iterable[Member]
    ) -> None:
        """Servers were asked for what they computed."""
        if (
            load.counted < self._looked_at + load.recent
            or (window_WLE := load.window_WLE()) is None
        ):
            return
        self._looked_at = load.counted
        settings, config = self._layout.settings, self._config
        rate = self._links.read({s: r.carried for s, r in readings.items()}, self._clock())
        self.signals = Signals(
            burstiness=burstiness(window_WLE),
            link_load=None if rate is None else min(1.0, rate / config.link_bytes_per_s),
            latency=self._latency_part(clients),
        )
        slots = load.experts + settings.num_redundant_experts
        tuned = self._tuner.look(Looked(window_WLE, len(readings), slots, self.signals))
        self._follow(load, tuned)

    def _latency_part(self, clients: Iterable[Member]) -> float | None:
        target_s = self._config.latency_target_ms / 1e3
        token_s = self._latency.read(self._token_times(clients)) if target_s else None
        return None if token_s is None else token_s / target_s

    def _follow(self, load: LoadState, tuned: Tuned) -> None:
        before = self._layout.settings
        self._layout.change(tuned=tuned.knobs, link_part=tuned.link_part)
        load.tolerate(self._config.drift_tolerance * tuned.drift_part)
        if dict(before.tuned) == dict(tuned.knobs) and before.link_part == tuned.link_part:
            return
        changes = [
            f"{name} {_told(before.tuned.get(name))} -> {_told(value)}"
            for name, value in tuned.knobs.items()
            if before.tuned.get(name) != value
        ]
        if before.link_part != tuned.link_part:
            changes.append(f"link {before.link_part:.0%} -> {tuned.link_part:.0%}")
        reason = f"{', '.join(changes)}: {'; '.join(tuned.reasons)}"
        _log.info("knobs: %s", reason)
        entry = pb.HistoryEntry(
            trigger="knobs",
            policy=before.policy,
            verdict=pb.VERDICT_NOTHING,
            reason=reason,
            knobs=tuned.knobs,
        )
        self._history.decided(entry)


def _told(value: float | None) -> str:
    return "unset" if value is None else f"{value:g}"
