"""The balancer as a process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from balancer.live.history import History
from balancer.live.mind import Settings
from balancer.live.reader import HotnessReader
from balancer.live.rebalancer import Rebalancer
from balancer.live.state import LiveLayout
from balancer.metrics import BalancerMetrics
from balancer.once import Once
from balancer.planner import Planner
from balancer.rollout import Rollout
from balancer.service import BalancerService
from eaas.config import BalancerConfig
from eaas.errors import ConfigError, EaasError
from eaas.grpc_server import Service, serve
from eaas.log import get_logger
from eaas.rpc.v1 import balancer_pb2_grpc
from eaas.session import MemberSession, Report
from eaas.shutdown import Shutdown
from eaas.types import Member, MemberState, Placement, Role

__all__ = ["Balancer", "run"]

_log = get_logger(__name__)

# Each client holds a worker for its watch. Threads are made when they are needed.
_WORKERS = 512
_GRACE_S = 0.2


class Balancer:
    """A balancer that works from its making until `stop`.

    Args:
        config: The balancer's settings.
        monitor_address: host:port of the monitor.
        on_stopping: Called when the operator stops the cluster, or this cannot go on (`failure`).

    Raises:
        PortInUseError: The port is taken.
        ConfigError: The host is not one of this machine, or redundancy is above expected_servers.
        ClusterError: The monitor cannot be reached.
    """

    def __init__(
        self, config: BalancerConfig, monitor_address: str, on_stopping: Callable[[], None]
    ) -> None:
        layout = LiveLayout(
            Settings(
                policy=config.policy,
                redundancy=config.redundancy,
                num_redundant_experts=config.num_redundant_experts,
                horizon_s=config.horizon_s,
                least_gain=config.least_gain,
                link_bytes_per_s=config.link_bytes_per_s,
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
        self.metrics = BalancerMetrics(lambda: layout.load, lambda: layout.settings)
        history = History(self.metrics.entry)
        self._rollout = Rollout(
            planner, self._publish, config.apply_timeout_s, self._on_broken, history.phase
        )
        self.rebalancer = Rebalancer(config, layout, self._rollout.ask, history)
        self._once = Once()
        self._service = BalancerService(
            self._rollout.ask, self.rebalancer, self._once, config.step_s
        )
        try:
            self._server = serve(
                [
                    Service(
                        "eaas.rpc.v1.BalancerService",
                        balancer_pb2_grpc.add_BalancerServiceServicer_to_server,
                        self._service,
                    )
                ],
                config.host,
                config.port,
                max_workers=_WORKERS,
            )
        except EaasError:
            self._rollout.close()
            raise
        self.address = self._server.address
        member = Member(
            id="balancer",
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
                on_change=self._rollout.observe,
                on_stopping=on_stopping,
            )
        except EaasError:
            self._rollout.close()
            self._server.stop(0)
            raise
        self._reader = HotnessReader(self.rebalancer, config.step_s, self._on_look, self._on_broken)
        self._server.set_serving(True)

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
        self._session.close()
        self._reader.close()
        self._rollout.close()
        self._service.close()
        self._server.stop(_GRACE_S)


def run(config: BalancerConfig, monitor_address: str, ready: Callable[[str], None]) -> None:
    """Works until SIGTERM, SIGINT (in the main thread) or the cluster's end.

    Args:
        config: The balancer's settings.
        monitor_address: host:port of the monitor.
        ready: Called with host:port once it serves.

    Raises:
        PortInUseError, ConfigError, ClusterError: See `Balancer`.
    """
    with Shutdown() as shutdown:
        balancer = Balancer(
            config, monitor_address, on_stopping=lambda: shutdown.request("the cluster stops")
        )
        try:
            ready(balancer.address)
            reason = shutdown.wait()
            if balancer.failure is not None:
                raise balancer.failure
            _log.info("balancer ends: %s", reason)
        finally:
            balancer.stop()
