"""Prometheus metrics of the balancer process. Most are computed at each scrape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from balancer.live.cost_benefit import planning_bound
from balancer.live.state import LoadState, Observed
from balancer.live.tuning import Signals
from balancer.planner.layout import Settings
from balancer.policies.types import Float
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Placement

__all__ = ["BalancerMetrics"]

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class BalancerMetrics(Collector):
    """The metrics of one balancer, in their own registry.

    Args:
        load: The observed load.
        settings: Returns the settings in force.
        signals: Returns the latest input of ScalpeLB's control loop; None without one.
        clock: Monotonic seconds.

    Attributes:
        registry: The Prometheus registry with these metrics.
    """

    def __init__(
        self,
        load: LoadState,
        settings: Callable[[], Settings],
        signals: Callable[[], Signals | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._settings = settings
        self._signals = signals
        self._clock = clock
        self._placement: Placement | None = None
        self._since = 0.0
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.decisions = Counter(
            "eaas_balancer_decisions",
            "Decisions about the placement",
            ["trigger", "verdict"],
            registry=self.registry,
        )
        self.moves = Counter(
            "eaas_balancer_moves", "Replicas that decisions had loaded", registry=self.registry
        )
        self.bytes = Counter(
            "eaas_balancer_moved_bytes", "Bytes of these replicas", registry=self.registry
        )
        self.spares = Gauge(
            "eaas_balancer_spare_replicas",
            "Replicas in servers' spare slots",
            registry=self.registry,
        )
        self.spare_loads = Counter(
            "eaas_balancer_spare_loads",
            "Replicas that servers loaded into spare slots",
            registry=self.registry,
        )
        self.phases = Histogram(
            "eaas_balancer_phase_seconds",
            "Seconds of a decision: plan, prepare (servers load), retire (clients follow, servers unload)",
            ["phase"],
            buckets=_SECONDS,
            registry=self.registry,
        )

    def published(self, placement: Placement) -> None:
        """Record a newly published placement, which the gauges of later scrapes describe."""
        self._placement, self._since = placement, self._clock()

    def entry(self, entry: pb.HistoryEntry) -> None:
        """Count a history entry: a new decision, or one whose roll-out is over (see `History`)."""
        if entry.retire_s:
            self.phases.labels("prepare").observe(entry.prepare_s)
            self.phases.labels("retire").observe(entry.retire_s)
            return
        verdict = pb.Verdict.Name(entry.verdict).removeprefix("VERDICT_").lower()
        self.decisions.labels(entry.trigger, verdict).inc()
        self.moves.inc(entry.transit)
        self.bytes.inc(entry.bytes)
        if entry.plan_s:
            self.phases.labels("plan").observe(entry.plan_s)

    def balancedness_L(self) -> Float | None:
        """Return mean / maximum of servers' loads in the window, by layer, for the log; None: no load yet."""
        placement = self._placement
        seen = self._load.observed(placement.servers) if placement else None
        return None if seen is None else 1 / seen.par_L

    def collect(self) -> Iterator[Any]:
        """Compute the gauges when Prometheus scrapes this process; none before the first placement."""
        placement = self._placement
        if placement is None:
            return
        yield _gauge("epoch", "Epoch of the placement", placement.epoch)
        yield _gauge("epoch_age_seconds", "Since it was published", self._clock() - self._since)
        yield from _of_knobs(self._settings(), self._signals())
        load, servers = self._load, placement.servers
        seen = load.observed(servers)
        if seen is None:
            return
        situation = load.situation(servers, placement.holds_LSE, placement.shares_LSE)
        bound_L = planning_bound(self._settings(), situation)
        yield from _of_layers(seen, bound_L)
        tokens_S = seen.load_LS.sum(axis=0)
        yield _by("server", "server_tokens", "Tokens in the window", servers, tokens_S)
        yield _by("server", "server_speed", "Relative speed", servers, seen.speeds_S)
        hotness = GaugeMetricFamily(
            "eaas_balancer_hotness", "Tokens in the window", labels=["layer", "expert"]
        )
        for (layer, expert), tokens in np.ndenumerate(seen.tokens_LE):
            hotness.add_metric([str(layer), str(expert)], float(tokens))
        yield hotness


def _of_knobs(settings: Settings, signals: Signals | None) -> Iterator[Any]:
    if tuned := settings.tuned:
        yield _by("knob", "knob", "Knob set by the control loop", tuned.keys(), tuned.values())
    if signals is not None:
        seen = {name: value for name, value in vars(signals).items() if value is not None}
        yield _by("signal", "signal", "Input of the control loop", seen.keys(), seen.values())


def _of_layers(seen: Observed, bound_L: Float) -> Iterator[Any]:
    layers = range(len(seen.par_L))
    yield _by("layer", "par", "Max over mean of the servers' loads", layers, seen.par_L)
    yield _by(
        "layer", "balancedness", "Mean over max of the servers' loads", layers, 1 / seen.par_L
    )
    gap_L = seen.par_L / bound_L
    yield _by("layer", "gap", "PAR over the least that the slots allow", layers, gap_L)


def _gauge(name: str, what: str, value: float) -> Any:
    return GaugeMetricFamily(f"eaas_balancer_{name}", what, value=value)


def _by(label: str, name: str, what: str, keys: Any, values: Any) -> Any:
    family = GaugeMetricFamily(f"eaas_balancer_{name}", what, labels=[label])
    for key, value in zip(keys, values, strict=True):
        family.add_metric([str(key)], float(value))
    return family
