"""What an attention client counts (Prometheus)."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from attention_client.outcomes import OutcomeTally

__all__ = ["ClientMetrics"]


class ClientMetrics:
    """Counters of the data path, in a registry of their own.

    Args:
        registry: Where they are registered.

    Attributes:
        outcomes: How requests end, by server; for the monitor, not in the registry.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.outcomes = OutcomeTally()
        self.layer_calls = Counter("eaas_layer_calls", "Calls of one MoE layer", registry=registry)
        self.layer_call_seconds = Histogram(
            "eaas_layer_call_seconds",
            "Time of one MoE layer call, dispatch to combine; with overlap, the other half's turn included",
            buckets=(5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
            registry=registry,
        )
        self.forwards = Counter(
            "eaas_forward_passes",
            "Forward passes of the decoder: of the whole batch, or of two micro-batches with overlap",
            ["batch"],
            registry=registry,
        )
        self.pairs = Counter(
            "eaas_dispatched_pairs", "(token, expert) pairs sent to servers", registry=registry
        )
        self.server_requests = Counter(
            "eaas_server_requests",
            "Requests to expert servers, one for each part of a layer call; without hedges",
            registry=registry,
        )
        self.failovers = Counter(
            "eaas_failovers",
            "Parts of a layer call that were sent to another replica",
            ["reason"],
            registry=registry,
        )
        self.late_answers = Counter(
            "eaas_late_answers", "Answers that came after nobody waited; dropped", registry=registry
        )
        self.hedges = Counter(
            "eaas_hedges",
            "Late requests that were sent to other replicas too: won, lost or failed",
            ["outcome"],
            registry=registry,
        )
        self.ejections = Counter(
            "eaas_ejections",
            "Servers that were left out for a while",
            ["reason"],
            registry=registry,
        )
        self.quarantined_slots = Counter(
            "eaas_quarantined_slots", "Slots with damaged bytes; not used again", registry=registry
        )
        self.nonfinite_rows = Counter(
            "eaas_nonfinite_rows",
            "Tokens whose sum over the experts is NaN or infinite",
            registry=registry,
        )
        self.unavailable = Counter(
            "eaas_layer_calls_failed", "Layer calls that no replica answered", registry=registry
        )
        self.view_age = Gauge(
            "eaas_view_age_seconds", "Time since the monitor was last heard", registry=registry
        )
        self.epoch = Gauge("eaas_placement_epoch", "Placement in use", registry=registry)
        self.connections = Gauge(
            "eaas_connected_servers", "Expert servers connected", registry=registry
        )

    def watch_coverage(self, uncovered: Callable[[], int], min_replicas: Callable[[], int]) -> None:
        """Shows what is connected of the placement, whenever somebody looks.

        Args:
            uncovered: (layer, expert) pairs without a connected replica.
            min_replicas: Connected replicas of the expert that has fewest.
        """
        for name, text, read in (
            ("eaas_uncovered_experts", "Experts of a layer without a connected replica", uncovered),
            ("eaas_min_replicas", "Connected replicas of the expert with fewest", min_replicas),
        ):
            Gauge(name, text, registry=self.registry).set_function(read)
