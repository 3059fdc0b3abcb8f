"""Prometheus metrics of a client's layer calls and connections; the client process serves them over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.registry import Collector

from attention_client.telemetry.request_outcomes import OutcomeTally

__all__ = ["ClientMetrics"]


class _Refresh(Collector):
    """Has no metric: brings counts up to date that compiled code keeps, before the others are collected."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        for step in self.steps:
            step()
        return ()


class ClientMetrics:
    """Prometheus metrics of a client's data path: layer calls, requests to servers, placement.

    Args:
        registry: Registry of the metrics.

    Attributes:
        outcomes: Request outcomes by server; reported to the monitor, not in the registry.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        # The first collector of the registry, as collectors run in the order of their registration.
        self._refresh = _Refresh()
        registry.register(self._refresh)
        self.outcomes = OutcomeTally()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self.layer_calls = counter("eaas_layer_calls", "Calls of one MoE layer")
        self.layer_call_seconds = Histogram(
            "eaas_layer_call_seconds",
            "Time of one MoE layer call, dispatch to combine; with overlap including the other half's turn",
            buckets=(5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
            registry=registry,
        )
        self.forwards = counter(
            "eaas_forward_passes",
            "Forward passes: compiled, whole (uncompiled), or as two overlapped micro-batches",
            ["batch"],
        )
        self.pairs = counter("eaas_dispatched_pairs", "(token, expert) pairs sent to servers")
        self.server_requests = counter(
            "eaas_server_requests",
            "Requests to expert servers, one per part of a layer call, without hedges",
        )
        self.failovers = counter(
            "eaas_failovers", "Parts of a layer call sent to another replica", ["reason"]
        )
        self.late_answers = counter(
            "eaas_late_answers", "Answers dropped because they came too late"
        )
        self.hedges = counter(
            "eaas_hedges",
            "Late requests also sent to other replicas: won, lost or failed",
            ["outcome"],
        )
        self.ejections = counter("eaas_ejections", "Servers ejected for a while", ["reason"])
        self.quarantined_slots = counter(
            "eaas_quarantined_slots", "Slots with damaged bytes, never used again"
        )
        self.nonfinite_rows = counter(
            "eaas_nonfinite_rows", "Tokens with a NaN or infinite sum over the experts"
        )
        self.unavailable = counter(
            "eaas_layer_calls_failed", "Layer calls that failed because no replica answered"
        )
        self.view_age = gauge(
            "eaas_view_age_seconds", "Time since the last message from the monitor"
        )
        self.load_pairs = gauge(
            "eaas_load_pairs", "Pairs of an expert that take as long as reading its weights"
        )
        self.epoch = gauge("eaas_placement_epoch", "Epoch of the placement in use")
        self.connections = gauge("eaas_connected_servers", "Expert servers connected")
        self.transports = gauge(
            "eaas_server_connections", "Connections to expert servers, by transport", ["transport"]
        )

    def refresh_with(self, step: Callable[[], None]) -> None:
        """Call `step` before each scrape, to add counts that are kept elsewhere."""
        self._refresh.steps.append(step)

    def watch_coverage(
        self,
        uncovered: Callable[[], int],
        min_replicas: Callable[[], int],
        min_nodes: Callable[[], int],
        nodes: Callable[[], int],
    ) -> None:
        """Export how well connected servers cover the experts, computed at each scrape.

        Args:
            uncovered: Returns the number of (layer, expert) pairs without a connected replica.
            min_replicas: Returns the number of connected replicas of the expert with the fewest.
            min_nodes: Returns the different nodes of those of the expert with the fewest nodes.
            nodes: Returns the number of different nodes of the connected servers.
        """
        for name, text, read in (
            ("eaas_uncovered_experts", "Experts of a layer without a connected replica", uncovered),
            ("eaas_min_replicas", "Connected replicas of the expert with the fewest", min_replicas),
            ("eaas_min_nodes", "Nodes of the expert with the fewest", min_nodes),
            ("eaas_nodes", "Different nodes of the connected servers", nodes),
        ):
            Gauge(name, text, registry=self.registry).set_function(read)
