"""The balancer as a process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
from prometheus_client import start_http_server

from balancer.journal import Journal
from balancer.live.history import History
from balancer.live.learned import LearnedTuner, read_knobs
from balancer.live.mind import Settings, check_node_budget
from balancer.live.reader import HotnessReader
from balancer.live.rebalancer import Rebalancer
from balancer.live.state import LiveLayout
from balancer.live.tuner import ControlLoop, Tuner
from balancer.live.tuning import Tuning
from balancer.memory import Memory
from balancer.metrics import BalancerMetrics
from balancer.once import Once
from balancer.planner import Planner
from balancer.rollout import Rollout
from balancer.service import ROLES, BalancerService
from balancer.token_times import token_times
from eaas.config import BalancerConfig
from eaas.errors import ClusterError, ConfigError, EaasError, PortInUseError
from eaas.exposure import member_secret
from eaas.grpc_client import Backoff
from eaas.grpc_server import Service, serve
from eaas.log import get_logger
from eaas.membership import MembershipView
from eaas.rpc.v1 import balancer_pb2, balancer_pb2_grpc
from eaas.session import MemberSession, Report
from eaas.shutdown import Shutdown
from eaas.tls import Identity
from eaas.types import Member, MemberState, Placement, Role

__all__ = ["Balancer", "run"]

_log = get_logger(__name__)

# Each client holds a worker for its watch. Threads are made when they are needed.
_WORKERS = 512
_GRACE_S = 0.2
# A placement of a thousand servers and a model of 58 layers of 256 experts, each twice, has 2 MB.
_MESSAGE_BYTES = 16 << 20
# One at a time is the balancer: the name is the fence.
_ID = "balancer"
_CALL_S = 2.0
# Longest wait for the record of the balancer before, and for one's own to be kept.
_RECORD_S = 10.0
_KEEP_S = 2.0


class Balancer:
    """A balancer that works from its making until `stop`.

    Args:
        config: The balancer's settings.
        monitor_address: host:port of the monitor.
        on_stopping: Called when the operator stops the cluster, or this cannot go on (`failure`).
        tls: Who this process is; None: plain text.

    Raises:
        PortInUseError: The port is taken.
        ConfigError: The host is not one of this machine, redundancy is above expected_servers, or the
            knobs or the node budget cannot be used.
        ClusterError: The monitor cannot be reached.
    """

    def __init__(
        self,
        config: BalancerConfig,
        monitor_address: str,
        on_stopping: Callable[[], None],
        tls: Identity | None = None,
    ) -> None:
        if config.node_budget >= 0:
            _check_nodes(config.policy)
        tuner = _tuner(config.knobs, config.policy)
        layout = LiveLayout(
            Settings(
                policy=config.policy,
                redundancy=config.redundancy,
                num_redundant_experts=config.num_redundant_experts,
                horizon_s=config.horizon_s,
                least_gain=config.least_gain,
                link_bytes_per_s=config.link_bytes_per_s,
                node_budget=None if config.node_budget < 0 else config.node_budget,
            )
        )
        try:
            planner = Planner(
                config.expected_servers,
                config.redundancy,
                config.dead_grace_s,
                config.ack_timeout_s,
                layout,
            )
        except ValueError as error:
            raise ConfigError(f"balancer: {error}") from error
        self._on_stopping = on_stopping
        # What nobody expected, and what this process ends for.
        self.failure: Exception | None = None
        self._log_balancedness = config.log_balancedness
        self.metrics = BalancerMetrics(
            lambda: layout.load,
            lambda: layout.settings,
            lambda: self.tuning.signals if self.tuning else None,
        )
        history = History(self._on_entry, self._changed)
        self._rollout = Rollout(
            planner, self._publish, config.apply_timeout_s, self._on_broken, history.phase, tls
        )
        self.tuning = Tuning(config, layout, history, tuner, token_times) if tuner else None
        self.rebalancer = Rebalancer(
            config, layout, self._rollout.ask, history, self.tuning, self._changed
        )
        once = Once(on_answered=self._keep)
        self._service = BalancerService(
            self._rollout.ask,
            self.rebalancer,
            once,
            config.step_s,
            # A cluster that was started with more may have as many again.
            max(config.max_servers, config.expected_servers),
            tls,
            config.dead_grace_s,
        )
        self._memory = Memory(layout, history, once)
        self._journal: Journal | None = None
        # What came before the record of the balancer before was read.
        self._early: MembershipView | None = None
        self._remembering = threading.Lock()
        self._remembers = False
        try:
            self._server = serve(
                [
                    Service(
                        "eaas.rpc.v1.BalancerService",
                        balancer_pb2_grpc.add_BalancerServiceServicer_to_server,
                        self._service,
                        ROLES,
                    )
                ],
                config.host,
                config.port,
                max_workers=_WORKERS,
                credentials=tls and tls.server_credentials(),
                secret=member_secret(monitor_address, config.host, tls),
                message_bytes=_MESSAGE_BYTES,
            )
        except EaasError:
            self._rollout.close()
            raise
        self.address = self._server.address
        self._metrics_server: Any = None
        if config.metrics_port:
            try:
                self._metrics_server, _ = start_http_server(
                    config.metrics_port, config.host, self.metrics.registry
                )
            except OSError as error:
                self._rollout.close()
                self._server.stop(0)
                raise PortInUseError(
                    f"balancer.metrics_port {config.metrics_port} cannot be used: {error.strerror}"
                ) from error
        member = Member(
            id=_ID,
            role=Role.BALANCER,
            pid=os.getpid(),
            host=socket.gethostname(),
            address=self.address,
            state=MemberState.SERVING,
        )
        try:
            self._session = MemberSession(
                monitor_address,
                member,
                report=lambda: Report(MemberState.SERVING, epoch=self._service.epoch),
                on_change=self._observe,
                on_stopping=on_stopping,
                on_replaced=self._replaced,
                tls=tls,
            )
        except EaasError:
            self._rollout.close()
            self._server.stop(0)
            raise
        self._remember()
        self._reader = HotnessReader(
            self.rebalancer, config.step_s, self._on_look, self._on_broken, tls
        )
        self._server.set_serving(True)

    def _observe(self, view: MembershipView) -> None:
        with self._remembering:
            if not self._remembers:
                self._early = view
                return
            # Before its epochs are seen: a process that wakes must not go on above them.
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
        """Another process is the balancer now: this one does nothing any more."""
        if self.failure is None:
            _log.error("another balancer has taken over %s", how)
            self._on_broken(ClusterError(f"another balancer has taken over {how}".rstrip()))

    def _remember(self) -> None:
        """Reads what the balancer before left: only now is it sure that it writes no more."""
        backoff, deadline = Backoff(), time.monotonic() + _RECORD_S
        while True:
            try:
                data = self._session.record(_CALL_S)
                break
            except grpc.RpcError as error:
                data = b""
                if time.monotonic() >= deadline:
                    _log.warning("going on without the record: %s", error.details())
                    break
            time.sleep(backoff.next_s())
        self._memory.restore(data, self._rollout.ask)
        self._journal = Journal(self._session, self._memory.record, self._on_broken)
        with self._remembering:
            self._remembers = True
            if self._early is not None:
                self._rollout.observe(self._early)

    def _on_entry(self, entry: balancer_pb2.HistoryEntry) -> None:
        self.metrics.entry(entry)
        self._changed()

    def _changed(self) -> None:
        if self._journal is not None:
            self._journal.changed()

    def _keep(self) -> None:
        """Before an operator is answered: whoever takes over is to know of it."""
        self._changed()
        if self._journal is not None and not self._journal.settle(_KEEP_S):
            _log.warning("an answer was given before the monitor had kept it")

    def _publish(self, placement: Placement) -> None:
        self.metrics.published(placement)
        self._service.publish(placement)

    def _on_look(self) -> None:
        if self._log_balancedness and (found_L := self.metrics.balancedness_L()) is not None:
            _log.info("balancedness by layer: %s", " ".join(f"{b:.3f}" for b in found_L))

    def _on_broken(self, error: Exception) -> None:
        self.failure = error
        self._on_stopping()

    def stop(self) -> None:
        """Says goodbye to the monitor and ends."""
        self._rollout.close()
        if self._journal is not None:
            self._journal.settle(_GRACE_S)
            self._journal.close()
        self._session.close()
        self._reader.close()
        if self._metrics_server is not None:
            self._metrics_server.shutdown()
            self._metrics_server.server_close()
        self._service.close()
        self._server.stop(_GRACE_S)


def _check_nodes(policy: str) -> None:
    """Raises ConfigError for a policy that would not keep to a node budget."""
    try:
        check_node_budget(policy)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _tuner(knobs: str, policy: str) -> Tuner | None:
    """Who sets knobs while the balancer runs. Raises ConfigError where a file is none, lost, or of no use."""
    if knobs == "static":
        return None
    if knobs == "live":
        return ControlLoop()
    learned = read_knobs(Path(knobs), must_win=True).knobs
    if policy != "scalpel":
        raise ConfigError(
            f"balancer.knobs: {knobs} has knobs of scalpel, and the policy is {policy}: "
            "give balancer.policy: scalpel"
        )
    return LearnedTuner(learned)


def run(
    config: BalancerConfig,
    monitor_address: str,
    ready: Callable[[str], None],
    tls: Identity | None = None,
) -> None:
    """Works until SIGTERM, SIGINT (in the main thread) or the cluster's end.

    Args:
        config: The balancer's settings.
        monitor_address: host:port of the monitor.
        ready: Called with host:port once it serves.
        tls: Who this process is; None: plain text.

    Raises:
        PortInUseError, ConfigError, ClusterError: See `Balancer`.
    """
    with Shutdown() as shutdown:
        balancer = Balancer(
            config,
            monitor_address,
            on_stopping=lambda: shutdown.request("the cluster stops"),
            tls=tls,
        )
        try:
            ready(balancer.address)
            reason = shutdown.wait()
            if balancer.failure is not None:
                raise balancer.failure
            _log.info("balancer ends: %s", reason)
        finally:
            balancer.stop()
