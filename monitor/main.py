"""The monitor as a process."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable

from eaas.config import MonitorConfig
from eaas.errors import ConfigError
from eaas.grpc_server import RunningServer, Service, serve
from eaas.log import get_logger
from eaas.rpc.v1 import monitor_pb2_grpc
from eaas.shutdown import Shutdown
from eaas.types import Member, MemberState, Role
from monitor.service import MonitorService

__all__ = ["Monitor", "run"]

_log = get_logger(__name__)

# A member holds two workers for as long as it lives (heartbeat, watch): about 250 members. Threads
# are made when they are needed.
_WORKERS = 512
_LINGER_S = 1.0
_GRACE_S = 0.2


class Monitor:
    """A monitor that serves from its making until `stop`.

    Raises:
        PortInUseError: The port is taken.
        ConfigError: The host is not one of this machine, or the lease is too short for heartbeat_s.
    """

    def __init__(self, config: MonitorConfig) -> None:
        if config.heartbeat_s >= config.lease_s / 2:
            raise ConfigError(
                f"monitor.heartbeat_s {config.heartbeat_s:g} must be below half of monitor.lease_s "
                f"{config.lease_s:g}: one late heartbeat must not make a member suspect"
            )
        self._config = config
        self._service = MonitorService(config.lease_s, config.heartbeat_s)
        self._server: RunningServer = serve(
            [
                Service(
                    "eaas.rpc.v1.MonitorService",
                    monitor_pb2_grpc.add_MonitorServiceServicer_to_server,
                    self._service,
                )
            ],
            config.host,
            config.port,
            max_workers=_WORKERS,
        )
        self.address = self._server.address
        self._service.register_self(
            Member(
                id="monitor",
                role=Role.MONITOR,
                pid=os.getpid(),
                host=socket.gethostname(),
                address=self.address,
                state=MemberState.SERVING,
            )
        )
        self._over = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="monitor-tick", daemon=True)
        self._ticker.start()
        self._server.set_serving(True)

    def _tick(self) -> None:
        pause_s = 0.0
        while not self._over.wait(pause_s):
            pause_s = self._service.tick()

    def stop(self) -> None:
        """Tells the members where the configuration says so, then ends."""
        if self._config.stop_members_on_exit:
            self._service.announce_stop(_LINGER_S)
        self._over.set()
        self._ticker.join()
        self._server.stop(_GRACE_S)


def run(config: MonitorConfig, ready: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT (in the main thread).

    Args:
        config: The monitor's settings.
        ready: Called with host:port once it serves.

    Raises:
        PortInUseError: The port is taken.
        ConfigError: See `Monitor`.
    """
    with Shutdown() as shutdown:
        monitor = Monitor(config)
        try:
            ready(monitor.address)
            _log.info("monitor ends: %s", shutdown.wait())
        finally:
            monitor.stop()
