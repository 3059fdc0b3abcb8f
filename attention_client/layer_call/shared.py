"""State shared by all layer calls of one client: cluster view, dispatch policy and measured server speeds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from attention_client.connections.connection import Connection
from attention_client.connections.deadlines import HedgeBudget
from attention_client.dispatch import DispatchPolicy
from attention_client.exchange import Exchange
from attention_client.layer_call.expert_attribution import ExpertAttribution
from attention_client.layer_call.server_speeds import Ejections, Speeds
from attention_client.telemetry.metrics import ClientMetrics
from attention_client.telemetry.tracing import LayerTraces
from eaas.replicas import Replicas
from eaas.spares import SpareReplicas
from eaas.types import Placement
from eaas.wire.slot import WireDtype

__all__ = ["CallContext", "CallCount", "ClusterView", "ViewSource"]

# Sets of servers whose replicas a view keeps: calls change between a few while servers fail.
_MOST_KEPT = 8


@dataclass(frozen=True, eq=False)
class ClusterView:
    """Placement and connections as one immutable snapshot, replaced when either changes.

    Attributes:
        placement: Epoch, servers, shares.
        connections: One per server of the placement; None if not connected.
        spares: Replicas beside the placement's.
    """

    placement: Placement
    connections: tuple[Connection | None, ...]
    spares: SpareReplicas = field(default_factory=SpareReplicas)
    _max_tokens: dict[tuple[int, WireDtype], Sequence[int]] = field(
        default_factory=dict, repr=False
    )
    _replicas: dict[bytes, Replicas] = field(default_factory=dict, repr=False)
    _all_replicas: list[Replicas] = field(default_factory=list, repr=False)

    def prepare(self, former: ClusterView | None) -> ClusterView:
        """Make the list of all replicas before the first call needs it, or take a former view's."""
        is_same = former is not None and (former.placement, former.spares) == (
            self.placement,
            self.spares,
        )
        if is_same and former is not None and former._all_replicas:
            self._all_replicas.extend(former._all_replicas)
        else:
            self._all_replicas.append(self._with_spares())
        return self

    def usable_S(self) -> npt.NDArray[np.bool_]:
        """Return whether each server of the placement has a live connection, even if ejected or avoided."""
        usable = [c is not None and c.lost_reason is None for c in self.connections]
        return np.array(usable, dtype=np.bool_)

    def replicas(self, usable_S: npt.NDArray[np.bool_]) -> Replicas:
        """Return the replicas on these servers. All, and the last few selections, are kept."""
        if not self._all_replicas:
            self._all_replicas.append(self._with_spares())
        if usable_S.all():
            return self._all_replicas[0]
        key = usable_S.tobytes()
        known = self._replicas.get(key)
        if known is None:
            if len(self._replicas) >= _MOST_KEPT:
                self._replicas.clear()
            known = self._replicas[key] = self._all_replicas[0].on(usable_S)
        return known

    def _with_spares(self) -> Replicas:
        shares = self.placement.replicas.used()
        layers, _, experts = self.placement.shape
        places = [
            (layer, s, expert)
            for s, server in enumerate(self.placement.servers)
            for layer, expert in self.spares.of(server)
            if layer < layers and expert < experts
        ]
        return shares.plus(*np.array(places).T) if places else shares

    def max_tokens(self, top_k: int, dtype: WireDtype) -> Sequence[int]:
        """Return how many tokens fit into a slot of each server; larger parts are cut. 1: no connection."""
        known = self._max_tokens.get((top_k, dtype))
        if known is None:
            known = [c.max_tokens(top_k, dtype) if c is not None else 1 for c in self.connections]
            self._max_tokens[top_k, dtype] = known
        return known


class ViewSource(Protocol):
    """Source of cluster views for layer calls (`Cluster` in a client)."""

    def view(self) -> ClusterView:
        """Return the newest cluster view. A layer call asks again before each send and resend."""

    def wait_for_change(self, seen: ClusterView, timeout_s: float) -> None:
        """Pause a layer call that could send nothing: until a view other than `seen`, or the timeout."""


class CallCount:
    """Counts the layer calls that compiled code did not finish. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.in_flight = 0
        self.finished = 0

    def begin(self) -> None:
        """Count a call as in flight; `end` must follow."""
        with self._lock:
            self.in_flight += 1

    def end(self) -> None:
        """Count the end of a call."""
        with self._lock:
            self.in_flight -= 1
            self.finished += 1


@dataclass(frozen=True, eq=False)
class CallContext:
    """State shared by all layer calls of one client. Thread-safe.

    Attributes:
        replicas: Source of cluster views.
        policy: Chooses among replicas.
        timeout_s: Deadline of a call over all attempts.
        attempt_timeout_s: Least time of one attempt.
        hedges: Budget of hedges.
        metrics: Metrics of the client.
        speeds: Measured speeds of the servers.
        ejections: Ejected servers.
        attribution: Records which server computed what.
        count: Counts the calls that are in Python.
        clock: Monotonic seconds.
        traces: Traces of requests; None: no tracing.
        finish: Waits for the answers of a compiled call and sums them, by this clock (`Exchange.finish`).
        on_stale: Called with a server's id and the spare replicas of the request, if it has one no more.
    """

    replicas: ViewSource
    policy: DispatchPolicy
    timeout_s: float
    attempt_timeout_s: float
    hedges: HedgeBudget
    metrics: ClientMetrics
    speeds: Speeds = field(default_factory=Speeds)
    ejections: Ejections = field(default_factory=Ejections)
    attribution: ExpertAttribution = field(default_factory=ExpertAttribution)
    count: CallCount = field(default_factory=CallCount)
    clock: Callable[[], float] = time.monotonic
    traces: LayerTraces | None = None
    finish: Callable[[Exchange], torch.Tensor | None] = Exchange.finish
    on_stale: Callable[[str, SpareReplicas], None] = lambda _server_id, _spares: None

    def eject_if_slow(self, server: str, now: float) -> None:
        """Eject a server for a while if its measured times are far above those of the others."""
        servers = self.replicas.view().placement.servers
        if self.speeds.is_outlier(server, servers) and self.ejections.slow(server, servers, now):
            # Judge the server by new measurements once the ejection ends.
            self.speeds.forget(server)
            self.metrics.ejections.labels("slow").inc()
