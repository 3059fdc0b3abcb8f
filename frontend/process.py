"""What every frontend does as a process: it is a member of the cluster and serves HTTP until a signal."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Gauge
from starlette.applications import Starlette

from eaas.cluster_snapshot import SnapshotReader
from eaas.cluster_snapshot.counters import Counters
from eaas.config import FrontendConfig
from eaas.control_plane.observer import ClusterObserver
from eaas.errors import ConfigError
from eaas.log import get_logger
from eaas.membership.session import MemberSession, MembershipView, Report
from eaas.net.api_keys import ApiKeys
from eaas.net.authorisation import OPERATOR
from eaas.net.grpc_server import host_to_tell, join_host_port
from eaas.net.http_access import known_hosts
from eaas.net.listen import bind
from eaas.net.listen_policy import only_here
from eaas.net.server_records import cluster_secret, new_secret, publish, withdraw
from eaas.net.tls import Identity
from eaas.types import Member, MemberState, Role
from frontend.access import Access
from frontend.dashboard.mount import Dashboard
from frontend.dashboard.operator import Operator
from frontend.dashboard.viewers import OperatorToken, token_of
from frontend.limits import ServeLimits
from frontend.network.server import HttpServer

__all__ = ["FrontendProcess"]

_log = get_logger(__name__)
_WAIT_STEP_S = 0.5
_GRACE_S = 1.0
_ReadCounters = Callable[[float], Counters]


@dataclass(frozen=True)
class FrontendProcess:
    """A frontend's process, as its command starts it.

    Attributes:
        id: Unique in the cluster.
        monitor_address: host:port.
        config: Settings of the endpoint.
        stopping: Ends it at once. A second signal sets it, or the operator who stops the cluster.
        leaving: Ends it once running requests have ended. The first signal sets it.
        on_serving: Called with the endpoint's URL once it serves.
        tls: Identity of this process; None: plain text.
        keys: API keys, one of which each request must present; None: no key is needed.
    """

    id: str
    monitor_address: str
    config: FrontendConfig
    stopping: threading.Event
    leaving: threading.Event
    on_serving: Callable[[str], None]
    tls: Identity | None = None
    keys: ApiKeys | None = None

    @property
    def access(self) -> Access:
        """Checks of requests."""
        return Access(self.keys, known_hosts(self.config.host, self.config.allowed_hosts))

    def _dashboard(
        self, host: str, port: int, observer: ClusterObserver, counters: _ReadCounters
    ) -> Dashboard | None:
        """Make the page, unless it is turned off, and publish the operator's token for `eaas status`."""
        if not self.config.dashboard:
            return None
        tls, operator, token = self.tls, None, None
        address = join_host_port(host, port)
        # An API key allows using the model, not operating the cluster.
        if self.config.operator_page and self.keys is None and only_here(host):
            secret = None if tls is not None else cluster_secret(self.monitor_address)
            shown = token_of(secret) if secret else new_secret()
            try:
                publish(address, shown)
            except ConfigError as error:
                _log.warning("the dashboard has no buttons: %s", error)
            else:
                operator = Operator(Identity(tls.directory, OPERATOR) if tls is not None else None)
                token = OperatorToken(shown, port)
        else:
            withdraw(address)
        return Dashboard(lambda: SnapshotReader(observer.members, counters, tls), operator, token)

    def serve(
        self,
        build: Callable[..., Starlette],
        limits: ServeLimits,
        *,
        counters: _ReadCounters,
        follow: Callable[[MembershipView], None],
        is_ready: Callable[[], bool],
        requests: Callable[[], int],
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Serve an application, as a member of the cluster, until a signal.

        Args:
            build: Makes the application, with the arguments `status` and `dashboard` of `build_app`.
            limits: Limits of the endpoint.
            counters: Reads the endpoint's counters; takes a timeout in seconds.
            follow: Called with each new view of the members.
            is_ready: Whether the application can serve; then this process is SERVING, for good.
            requests: Returns the number of running requests.
            registry: Gets the age of the view of the members; None: the endpoint has no metrics of its own.

        Raises:
            PortInUseError: The endpoint's port is taken.
            ClusterError: The monitor cannot be reached.
        """
        state = MemberState.JOINING
        with bind(self.config.host, self.config.port) as listener, ExitStack() as stack:
            host, port = listener.getsockname()[:2]
            address = join_host_port(host_to_tell(self.config.host), port)
            observer = ClusterObserver(self.monitor_address, self.tls)
            stack.callback(observer.close)

            def status() -> dict[str, Any]:
                return observer.status(f"http://{address}") | {"tls": self.tls is not None}

            app = build(status=status, dashboard=self._dashboard(host, port, observer, counters))
            server = HttpServer(app, listener, limits)
            server.start()
            # Idempotent: after a drain no request is left.
            stack.callback(server.stop, _GRACE_S)
            session = MemberSession(
                self.monitor_address,
                Member(self.id, Role.FRONTEND, os.getpid(), socket.gethostname(), address, state),
                report=lambda: Report(state, in_flight=requests()),
                on_change=follow,
                on_stopping=self.stopping.set,
                tls=self.tls,
            )
            stack.callback(session.close, deregister=True)
            if registry is not None:
                Gauge(
                    "eaas_view_age_seconds",
                    "Time since the last message from the monitor",
                    registry=registry,
                ).set_function(lambda: session.view.age_s(time.monotonic()))
            while not self.stopping.is_set() and not self.leaving.is_set():
                if state is MemberState.JOINING and is_ready():
                    state = MemberState.SERVING
                    session.report_now()
                    self.on_serving(f"http://{address}")
                # In steps, because a signal handled by another thread does not wake this one.
                self.stopping.wait(
                    _WAIT_STEP_S if state is MemberState.SERVING else _WAIT_STEP_S / 10
                )
            if self.leaving.is_set() and not self.stopping.is_set():
                server.stop(self.config.drain_timeout_s, self.stopping)
