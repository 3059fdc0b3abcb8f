"""Sets ScalpeLB's knobs while the balancer runs (`balancer.knobs: live`): reads the inputs of `control`.

window, links' counters, endpoints' metrics --> control --> settings in force, history
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from balancer.autoscaler.meters import LatencyMeter
from balancer.live.control import Control, Signals, control
from balancer.live.history import History
from balancer.live.hotness import Reading
from balancer.live.signals import LinkMeter, burstiness
from balancer.live.state import LiveLayout, LoadState
from eaas.log import get_logger
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Member

__all__ = ["Tuning"]

_log = get_logger(__name__)
_TokenTimes = Callable[[Iterable[Member]], Mapping[tuple[str, int], tuple[float, float]]]


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
        layout: LiveLayout,
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
        self._state = Control()
        self._counted = 0
        self.signals: Signals | None = None
        """The latest observation; None: none yet."""

    def step(
        self, load: LoadState, readings: Mapping[str, Reading], clients: Iterable[Member]
    ) -> None:
        """After a step: every `load.recent` counted steps, observe, and set changed knobs for later plans."""
        if load.counted < self._counted + load.recent or (window_WLE := load.window_WLE()) is None:
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
        self._state, knobs, reasons = control(
            self._state, self.signals, spare_slots=settings.num_redundant_experts > 0
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
