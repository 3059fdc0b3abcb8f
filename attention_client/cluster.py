"""The cluster as one attention client sees it: membership, placement and a connection to each server.

The client keeps the last views from the monitor and the balancer. Both are off the data path: if both fail,
serving continues with these views. A lost connection is dropped at once, regardless of the server's state in
the monitor's view.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from attention_client.connections.deadlines import HedgeBudget
from attention_client.connections.server_connections import ServerConnections
from attention_client.dispatch import dispatch_policy
from attention_client.layer_call.expert_attribution import ExpertAttribution
from attention_client.layer_call.layer_calls import LayerCalls
from attention_client.layer_call.shared import CallContext, ClusterView
from attention_client.placement_adoption import PlacementSwitch
from attention_client.telemetry.metrics import ClientMetrics
from attention_client.telemetry.tracing import LayerTraces
from eaas import transports
from eaas.config import HOLD_BACK_S, AttentionClientConfig
from eaas.control_plane.placement_watch import PlacementWatch
from eaas.errors import ClusterError
from eaas.log import get_logger
from eaas.membership.failure_reports import OutcomeReporter
from eaas.membership.same_checkpoint import refuse_other_checkpoint
from eaas.membership.session import MemberSession, MembershipView, Report
from eaas.net.tls import Identity
from eaas.nodes import different_nodes, node_of
from eaas.spares import SpareReplicas
from eaas.types import Member, MemberState, ModelShape, Placement, Role

__all__ = ["Cluster"]

_log = get_logger(__name__)
_TRANSPORTS = transports.names()
# A process may hold several models, and each is a separate member of the cluster.
_numbers = itertools.count()


class Cluster:
    """An attention client's membership in a cluster, and its calls to the routed experts of each MoE layer.

    Args:
        monitor_address: host:port of the monitor.
        shape: Model of this client.
        config: Transport, slots, timeouts.
        metrics: Metrics of this client.
        client_id: Unique in the cluster; defaults to an id from host and process id.
        address: host:port shown by `eaas status`: of the engine, or of vLLM's HTTP endpoint.
        engine_address: host:port of this client's engine for frontends; empty: it has none.
        on_stopping: Called when the operator stops the cluster.
        tls: Identity of this process; None: plain text.
        traces: Traces of requests; None: no tracing.

    Attributes:
        layer_call: Computes the routed experts of one MoE layer for the model's forward pass, in place of its
            own experts, and waits for the result (`LayerCalls.run`).
        start_layer_call: Starts such a call without waiting (`LayerCalls.start`).

    Raises:
        ClusterError: The monitor cannot be reached.
        ConfigError: The transport is not installed.
    """

    def __init__(
        self,
        monitor_address: str,
        shape: ModelShape,
        config: AttentionClientConfig,
        metrics: ClientMetrics,
        *,
        client_id: str | None = None,
        address: str = "",
        engine_address: str = "",
        on_stopping: Callable[[], None] | None = None,
        tls: Identity | None = None,
        traces: LayerTraces | None = None,
    ) -> None:
        self.shape = shape
        self.config = config
        self.metrics = metrics
        self.monitor_address = monitor_address
        self.attribution = ExpertAttribution()
        hostname, self._pid = socket.gethostname(), os.getpid()
        self.client_id = client_id or f"client-{hostname}-{self._pid}-{next(_numbers)}"
        self._changed = threading.Condition()
        self._switch = PlacementSwitch(HOLD_BACK_S)
        self._spares = SpareReplicas()
        self._view: ClusterView | None = None
        self._members: MembershipView | None = None
        self._state = MemberState.JOINING
        self._closed = False
        shared = self._call_context(traces)
        self._levels = shared.policy.levels
        self._calls = LayerCalls(shared, config.checksum)
        self.layer_call = self._calls.run
        self.start_layer_call = self._calls.start
        metrics.refresh_with(self._calls.read)
        self._servers = ServerConnections(
            self.client_id, shape, config, metrics, self._changed, self._refresh, tls
        )
        member = Member(
            id=self.client_id,
            role=Role.ATTENTION_CLIENT,
            pid=self._pid,
            host=hostname,
            address=address,
            state=MemberState.JOINING,
            model=shape,
            engine_address=engine_address,
        )
        self.session = MemberSession(
            monitor_address,
            member,
            report=self._report,
            on_change=self._on_members,
            on_stopping=on_stopping,
            tls=tls,
        )
        self._servers.start(self.session)
        self._reporter = OutcomeReporter(self.session, metrics.outcomes, self._settle)
        metrics.view_age.set_function(lambda: self.session.view.age_s(time.monotonic()))
        metrics.load_pairs.set_function(lambda: shared.speeds.load_pairs)
        self._placements = PlacementWatch(
            self._balancer_address, self._on_placement, tls, self._on_spares
        )

    # -- calls ----------------------------------------------------------------------------------------

    def _call_context(self, traces: LayerTraces | None) -> CallContext:
        return CallContext(
            replicas=self,
            policy=dispatch_policy(self.config.dispatch),
            timeout_s=self.config.layer_timeout_s,
            attempt_timeout_s=self.config.attempt_timeout_s,
            hedges=HedgeBudget(self.config.hedge_share),
            metrics=self.metrics,
            attribution=self.attribution,
            traces=traces,
            on_stale=self._on_stale,
        )

    def view(self) -> ClusterView:
        """Return the newest placement and its connections, by which layer calls send.

        Raises ClusterError before the first placement.
        """
        if self._view is None:
            raise ClusterError("the balancer has not published a placement yet; wait until SERVING")
        return self._view

    def wait_for_change(self, seen: ClusterView, timeout_s: float) -> None:
        """Pause a layer call that could send nothing: until a view other than `seen`, or the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._view is not seen, timeout_s)

    def wait_until_covered(self, timeout_s: float, stopping: threading.Event | None = None) -> None:
        """Wait, before SERVING, until there is a placement and every expert has a connected replica.

        Args:
            timeout_s: Longest wait.
            stopping: Ends the wait early.

        Raises:
            ClusterError: The timeout passed (the message says why), or the servers serve another model.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self.missing() and not (stopping and stopping.is_set()):
                members = self.session.view.members.values()
                refuse_other_checkpoint(members, self.shape, self.monitor_address)
                if time.monotonic() >= deadline:
                    raise ClusterError(f"not ready after {timeout_s:.0f} s: {self.missing()}")
                self._changed.wait(0.2)

    def missing(self) -> str:
        """Return why this client cannot serve, for its start and its health check; empty if it can."""
        if self._view is None:
            return "no placement yet"
        if uncovered := self.uncovered():
            layer, expert = uncovered[0]
            why = "".join(f"; {server}: {why}" for server, why in self._servers.refusals().items())
            return (
                f"{len(uncovered)} expert(s) without a live replica, "
                f"first: layer {layer}, expert {expert}{why}"
            )
        return ""

    def uncovered(self) -> list[tuple[int, int]]:
        """Return the (layer, expert) pairs without a connected replica, for `missing` and the metrics."""
        replicas_LE = self.replicas_LE()
        if replicas_LE is None:
            return []
        return [(int(layer), int(expert)) for layer, expert in np.argwhere(replicas_LE == 0)]

    def replicas_LE(self) -> npt.NDArray[np.int64] | None:
        """Return each expert's connected replicas, for coverage and status: int64 (L, E).

        None without a placement.
        """
        view = self._view
        return None if view is None else view.placement.replicas.count_LE(view.usable_S())

    def nodes_LE(self) -> npt.NDArray[np.int64] | None:
        """Return the different nodes of each expert's connected replicas, for coverage: int64 (L, E).

        None without a placement.
        """
        view = self._view
        if view is None:
            return None
        nodes = self._nodes(view.placement.servers)
        return different_nodes(view.placement.replicas, nodes, view.usable_S())

    def num_nodes(self) -> int:
        """Return the number of different nodes of the connected servers; 0 without a placement."""
        view = self._view
        if view is None:
            return 0
        nodes = zip(self._nodes(view.placement.servers), view.usable_S(), strict=True)
        return len({node for node, usable in nodes if usable})

    def _nodes(self, servers: Iterable[str]) -> list[str]:
        members = self.session.view.members
        return [node_of(members[s]) if s in members else s for s in servers]

    @property
    def placement(self) -> Placement | None:
        """The placement that layer calls use; the balancer's may be newer. None before the first one."""
        return self._switch.current

    # -- membership -----------------------------------------------------------------------------------

    def serving(self) -> None:
        """Become SERVING and tell the monitor at once. Called when the endpoint or loaded model is ready."""
        self._state = MemberState.SERVING
        self.session.report_now()

    def draining(self) -> None:
        """Become DRAINING and tell the monitor at once: frontends send nothing more."""
        self._state = MemberState.DRAINING
        self.session.report_now()

    def _report(self) -> Report:
        placement = self._switch.current
        return Report(
            state=self._state,
            progress=self._calls.finished,
            in_flight=self._calls.in_flight,
            experts=0,
            epoch=placement.epoch if placement else 0,
            reach=self._servers.reach(),
        )

    def _balancer_address(self) -> str | None:
        live = self._members.live(Role.BALANCER) if self._members else ()
        return live[0].address if live else None

    def _on_members(self, members: MembershipView) -> None:
        self._members = members
        self._servers.follow(members)

    def _on_placement(self, placement: Placement) -> None:
        if placement.shape[::2] != (self.shape.num_layers, self.shape.num_experts):
            _log.error("placement %d is of another model: ignored", placement.epoch)
            return
        with self._changed:
            if not self._switch.offer(placement, time.monotonic()):
                return
            self._refresh()
            due_at = self._switch.due_at()
        if due_at is not None:
            timer = threading.Timer(max(0.0, due_at - time.monotonic()), self._refresh)
            timer.daemon = True
            timer.start()

    def _on_spares(self, spares: SpareReplicas) -> None:
        # Fixed shares would give a spare replica too much: it is chosen for the best division of the load.
        if not self._levels:
            return
        with self._changed:
            if spares != self._spares:
                self._spares = spares
                self._refresh()

    def _on_stale(self, server_id: str, spares: SpareReplicas) -> None:
        """Use no spare replica of a server that has lost one, until the balancer states them again.

        Args:
            server_id: The server.
            spares: What was known when it was asked. If the balancer has stated others since, those count.
        """
        with self._changed:
            if self._spares is spares:
                self._spares = spares.without(server_id)
                self._refresh()

    def _refresh(self) -> None:
        """Rebuild the view after a change of connections or replicas; wake the layer calls that wait.

        Switches to a newer placement if it is ready (`PlacementSwitch`).
        """
        with self._changed:
            switched = self._switch.advance(self._servers.live(), time.monotonic())
            placement = self._switch.current
            if placement is not None:
                is_theirs = self._spares.epoch == placement.epoch
                view = ClusterView(
                    placement,
                    self._servers.of(placement.servers),
                    self._spares if is_theirs else SpareReplicas(),
                )
                self._view = view.prepare(self._view)
            if switched and placement is not None:
                self.metrics.epoch.set(placement.epoch)
                # The balancer waits until every client reports the new epoch.
                self.session.report_now()
            connections = self._servers.all()
            self.metrics.connections.set(len(connections))
            by_transport = Counter(connection.transport for connection in connections)
            for transport in _TRANSPORTS:
                self.metrics.transports.labels(transport).set(by_transport[transport])
            self._changed.notify_all()

    def _settle(self) -> bool:
        """For the reporter of outcomes: count late answers and free their slots.

        Returns whether a server still owes an answer to an overdue request.
        """
        return any([connection.owes_answer() for connection in self._servers.all()])

    def close(self) -> None:
        """Leave the cluster at exit: free the slots, deregister, end this client's threads. Idempotent.

        Does nothing in a forked child, because membership and slots belong to its parent.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._servers.stop()
        self._placements.close()
        self._reporter.close()
        self.session.close(deregister=True)
        with self._changed:
            self._changed.notify_all()
        self._servers.close()
