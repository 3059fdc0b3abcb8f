"""The balancer as a process."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

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
        on_stopping: Called when the operator stops the cluster.

    Raises:
        PortInUseError: The port is taken.
        ConfigError: The host is not one of this machine, or redundancy is above expected_servers.
        ClusterError: The monitor cannot be reached.
    """

    def __init__(
        self, config: BalancerConfig, monitor_address: str, on_stopping: Callable[[], None]
    ) -> None:
        try:
            planner = Planner(
                config.expected_servers,
                config.redundancy,
                config.dead_grace_s,
                config.ack_timeout_s,
            )
        except ValueError as error:
            raise ConfigError(f"balancer: {error}") from error
        self._rollout = Rollout(planner, self._publish, config.apply_timeout_s)
        self._service = BalancerService(self._rollout.ask)
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
        self._server.set_serving(True)

    def _publish(self, placement: Placement) -> None:
        self._service.publish(placement)

    def stop(self) -> None:
        """Says goodbye to the monitor and ends."""
        self._session.close()
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
            _log.info("balancer ends: %s", shutdown.wait())
        finally:
            balancer.stop()
