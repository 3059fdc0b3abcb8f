"""The balancer process: connects to the monitor, plans and serves placements, until it is stopped."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import grpc
from prometheus_client import start_http_server

from balancer.autoscaler.meters import token_times
from balancer.live.history import History
from balancer.live.reader import HotnessReader
from balancer.live.rebalancer import Rebalancer
from balancer.live.state import LoadState
from balancer.live.tuning import Tuning
from balancer.metrics import BalancerMetrics
from balancer.persistence.idempotency import IdempotencyCache
from balancer.persistence.snapshot import BalancerSnapshot
from balancer.persistence.write_ahead import WriteAheadState
from balancer.planner.layout import Layout, Settings
from balancer.planner.planner import Planner
from balancer.rollout import Rollout
from balancer.service import ROLES, BalancerService
from balancer.spare_slots import SpareSlots
from eaas.config import BalancerConfig
from eaas.errors import ClusterError, ConfigError, PortInUseError
from eaas.log import get_logger
from eaas.membership.cluster_view import MembershipView
from eaas.membership.session import MemberSession, Report
from eaas.net.grpc_client import Backoff
from eaas.net.grpc_server import RunningServer, Service, serve
from eaas.net.listen_policy import member_secret
from eaas.net.probes import ProbeServer
from eaas.net.tls import Identity
from eaas.rpc.v1 import balancer_pb2, balancer_pb2_grpc
from eaas.shutdown import Shutdown
from eaas.spares import SpareReplicas
from eaas.types import Member, MemberState, Placement, Role

__all__ = ["Balancer", "run"]

_log = get_logger(__name__)

# Most threads of the gRPC server. Each client's watch occupies one; threads start on demand.
_WORKERS = 512
_GRACE_S = 0.2
# Limit of a message. A placement of 1,000 servers and 58 layers of 256 experts, each twice, has 2 MB.
_MESSAGE_BYTES = 16 << 20
# All balancers share this member id, so that the monitor accepts only one at a time.
_ID = "balancer"
_CALL_S = 2.0
# Longest wait for the previous balancer's record to be read.
_RECORD_S = 10.0


class Balancer:
    """A balancer that runs from its construction until `stop`.

    Args:
        config: The balancer's settings.
        monitor_address: host:port of the monitor.
        on_stopping: Called when the operator stops the cluster, or after an error (`failure`).
        tls: This process's identity; None: plain text.
        latency_target_ms: Target of the mean time between two tokens, for live knobs; 0: none.

    Raises:
        PortInUseError: The port is taken.
        ConfigError: The host is not one of this machine, redundancy is above expected_servers, the policy is
            unknown, or the policy or spare slots cannot keep to a node budget.
        ClusterError: The monitor cannot be reached.
    """

    def __init__(
        self,
        config: BalancerConfig,
        monitor_address: str,
        on_stopping: Callable[[], None],
        tls: Identity | None = None,
        latency_target_ms: float = 0.0,
    ) -> None:
        load = LoadState(config)
        layout = Layout(Settings.of(config), load.situation)
        planner = _planner_of(config, layout)
        self._config, self._tls = config, tls
        self._on_stopping = on_stopping
        # The unexpected error that ends this process; None: none.
        self.failure: Exception | None = None
        self._write_ahead = WriteAheadState(self._on_broken)
        history = History(self._on_entry, self._write_ahead.changed)
        self.tuning = (
            Tuning(layout, history, latency_target_ms, token_times)
            if config.knobs == "live"
            else None
        )
        self.metrics = BalancerMetrics(
            load,
            lambda: layout.settings,
            lambda: self.tuning.signals if self.tuning else None,
        )
        self._rollout = Rollout(
            planner, self._publish, config.apply_timeout_s, self._on_broken, history.phase, tls
        )
        self.rebalancer = Rebalancer(
            *(config, layout, load, self._rollout.ask, history, self.tuning),
            on_change=self._write_ahead.changed,
        )
        idempotency = IdempotencyCache(on_answered=self._write_ahead.store)
        snapshot = BalancerSnapshot(layout, history, idempotency)
        self._spare_slots: SpareSlots | None = None
        self._restoring = threading.Lock()
        self._restored = False
        with ExitStack() as undo:
            undo.callback(self._rollout.close)
            self._service, self._server = self._serve(monitor_address, idempotency)
            undo.callback(self._server.stop, _GRACE_S)
            undo.callback(self._service.close)
            self.address = self._server.address
            self._serve_probes(undo)
            self._serve_metrics(undo)
            self._session = self._join(monitor_address)
            undo.callback(self._session.close)
            self._restore(snapshot)
            undo.callback(self._write_ahead.close)
            on_broken = self._on_broken
            if config.spare_slots:
                self._spare_slots = SpareSlots(
                    self.rebalancer, config.step_s, self._publish_spares, on_broken, tls
                )
                undo.callback(self._spare_slots.close)
            reader = HotnessReader(self.rebalancer, config.step_s, self._on_read, on_broken, tls)
            undo.callback(reader.close)
            self._cleanup = undo.pop_all()
        self._server.set_serving(True)

    def _serve(
        self, monitor_address: str, idempotency: IdempotencyCache
    ) -> tuple[BalancerService, RunningServer]:
        config, tls = self._config, self._tls
        service = BalancerService(
            self._rollout.ask,
            self.rebalancer,
            idempotency,
            config.step_s,
            # A cluster that started with more servers may have that many again.
            max(config.max_servers, config.expected_servers),
            tls,
            config.dead_grace_s,
        )
        add = balancer_pb2_grpc.add_BalancerServiceServicer_to_server
        server = serve(
            [Service("eaas.rpc.v1.BalancerService", add, service, ROLES)],
            config.host,
            config.port,
            max_workers=_WORKERS,
            credentials=tls and tls.server_credentials(),
            secret=member_secret(monitor_address, config.host, tls),
            message_bytes=_MESSAGE_BYTES,
        )
        return service, server

    def _serve_probes(self, undo: ExitStack) -> None:
        host, port = self._config.host, self._config.health_port
        if port:
            probes = ProbeServer(host, port, lambda: self._server.serving, lambda: True)
            undo.callback(probes.close)

    def _join(self, monitor_address: str) -> MemberSession:
        member = Member(
            id=_ID,
            role=Role.BALANCER,
            pid=os.getpid(),
            host=socket.gethostname(),
            address=self.address,
            state=MemberState.SERVING,
        )
        return MemberSession(
            monitor_address,
            member,
            report=lambda: Report(MemberState.SERVING, epoch=self._service.epoch),
            on_change=self._observe,
            on_stopping=self._on_stopping,
            on_replaced=self._replaced,
            tls=self._tls,
        )

    def _serve_metrics(self, undo: ExitStack) -> None:
        host, port = self._config.host, self._config.metrics_port
        if not port:
            return
        try:
            server, _ = start_http_server(port, host, self.metrics.registry)
        except OSError as error:
            raise PortInUseError(
                f"balancer.metrics_port {port} cannot be used: {error.strerror}"
            ) from error
        undo.callback(server.server_close)
        undo.callback(server.shutdown)

    def _observe(self, view: MembershipView) -> None:
        with self._restoring:
            if self._restored:
                self._follow(view)

    def _follow(self, view: MembershipView) -> None:
        """Pass a cluster view to the planner, or stop if it names another process as the balancer."""
        # Checked before the planner sees the view's epochs: a process that was suspended and replaced must
        # not make placements above them.
        now = view.members.get(_ID)
        if (
            now is not None
            and now.address != self.address
            and now.incarnation > self._session.incarnation
        ):
            self._replaced(f"by {now.address}, as incarnation {now.incarnation}")
        if self.failure is None:
            self._rollout.observe(view)

    def _replaced(self, how: str = "") -> None:
        """End this process with an error, because the monitor names another one as the balancer."""
        if self.failure is None:
            _log.error("another balancer has taken over %s", how)
            self._on_broken(ClusterError(f"another balancer has taken over {how}".rstrip()))

    def _restore(self, snapshot: BalancerSnapshot) -> None:
        """Restore the previous balancer's state from the monitor's store; only then follow cluster views.

        This process has registered before, so the previous one can no longer write.
        """
        snapshot.restore(self._previous_record(), self._rollout.ask)
        self._write_ahead.start(self._session, snapshot.record)
        with self._restoring:
            self._restored = True
            # Views that arrived before the record was read.
            if self._session.view.members:
                self._follow(self._session.view)

    def _previous_record(self) -> bytes:
        backoff, deadline = Backoff(), time.monotonic() + _RECORD_S
        while True:
            try:
                return self._session.record(_CALL_S)
            except grpc.RpcError as error:
                if time.monotonic() >= deadline:
                    _log.warning("going on without the record: %s", error.details())
                    return b""
            time.sleep(backoff.next_s())

    def _on_entry(self, entry: balancer_pb2.HistoryEntry) -> None:
        self.metrics.entry(entry)
        self._write_ahead.changed()

    def _publish(self, placement: Placement) -> None:
        self.metrics.published(placement)
        self._service.publish(placement)

    def _publish_spares(self, spares: SpareReplicas, loaded: int) -> None:
        self.metrics.spares.set(len(spares))
        self.metrics.spare_loads.inc(loaded)
        self._service.publish_spares(spares)

    def _on_read(self) -> None:
        if self._spare_slots is not None:
            self._spare_slots.begin()
        if self._config.log_balancedness and (found_L := self.metrics.balancedness_L()) is not None:
            _log.info("balancedness by layer: %s", " ".join(f"{b:.3f}" for b in found_L))

    def _on_broken(self, error: Exception) -> None:
        self.failure = error
        self._on_stopping()

    def stop(self) -> None:
        """Leave the cluster, and stop all threads and gRPC and metrics servers of this process."""
        self._rollout.close()
        self._write_ahead.flush(_GRACE_S)
        self._cleanup.close()


def _planner_of(config: BalancerConfig, layout: Layout) -> Planner:
    try:
        return Planner(config.expected_servers, layout, config.dead_grace_s)
    except ValueError as error:
        raise ConfigError(f"balancer: {error}") from error


def run(
    config: BalancerConfig,
    monitor_address: str,
    ready: Callable[[str], None],
    tls: Identity | None = None,
    latency_target_ms: float = 0.0,
) -> None:
    """Run the balancer until SIGTERM, SIGINT (in the main thread) or the end of the cluster.

    A signal before it serves ends the process at once.

    Args:
        config: The balancer's settings.
        monitor_address: host:port of the monitor.
        ready: Called with host:port once it serves.
        tls: This process's identity; None: plain text.
        latency_target_ms: See `Balancer`.

    Raises:
        PortInUseError, ConfigError, ClusterError: See `Balancer`.
    """
    shutdown = Shutdown()
    balancer = Balancer(
        config,
        monitor_address,
        on_stopping=lambda: shutdown.request("the cluster stops"),
        tls=tls,
        latency_target_ms=latency_target_ms,
    )
    with shutdown:
        try:
            ready(balancer.address)
            reason = shutdown.wait()
            if balancer.failure is not None:
                raise balancer.failure
            _log.info("balancer ends: %s", reason)
        finally:
            balancer.stop()
