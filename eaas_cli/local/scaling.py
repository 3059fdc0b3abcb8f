"""Scaling by the launcher: follow the balancer's wanted number of expert servers, one server at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from eaas.control_plane.balancer_client import BalancerClient
from eaas.control_plane.balancer_watch import BalancerWatch
from eaas.counted import counted
from eaas.errors import ClusterError, EaasError
from eaas.log import get_logger
from eaas.rpc.v1 import balancer_pb2

if TYPE_CHECKING:
    from eaas.net.tls import Identity
    from eaas_cli.local.interface import LaunchedCluster, ServerProcess

__all__ = ["ScaleWatch", "Scaler"]

_log = get_logger(__name__)


class ScaleWatch(BalancerWatch):
    """Watches the balancer's wanted number of expert servers, in a daemon thread of the launcher.

    Args:
        balancer_address: Returns host:port of the live balancer; None while there is none.
        on_wanted: Called on that thread with each new number and the id of the request.
        tls: Identity of the caller; None for plain text.
    """

    def __init__(
        self,
        balancer_address: Callable[[], str | None],
        on_wanted: Callable[[int, int], None],
        tls: Identity | None = None,
    ) -> None:
        self._on_wanted = on_wanted
        # A new stream must not repeat a request that was carried out.
        self._known_wish = 0
        super().__init__(balancer_address, self._numbers, self._wanted, tls, "scale-watch")

    def _numbers(self, stub: Any) -> Any:
        return stub.WatchScale(balancer_pb2.WatchScaleRequest(known_wish=self._known_wish))

    def _wanted(self, response: balancer_pb2.WatchScaleResponse) -> None:
        self._known_wish = response.wish
        if response.servers:
            self._on_wanted(response.servers, response.wish)


class Scaler:
    """Brings a cluster to the wanted number of expert servers. Not thread-safe, except `want`.

    A started server counts once it serves. A drained server leaves once its experts are on other servers.

    Args:
        others: Returns the names of live servers that the cluster did not start.
        balancer_address: Returns host:port of the live balancer; by default that of the cluster's own.
    """

    def __init__(
        self,
        cluster: LaunchedCluster,
        others: Callable[[], Collection[str]] = lambda: (),
        balancer_address: Callable[[], str | None] | None = None,
    ) -> None:
        self._cluster = cluster
        self._others = others
        self._balancer_address = balancer_address or cluster.balancer_address
        self._lock = threading.Lock()
        self._wanted: int | None = None
        self._wish = 0
        self._starting: ServerProcess | None = None
        self._ready_by = 0.0
        self._leaving: ServerProcess | None = None

    def want(self, servers: int, wish: int = 0) -> None:
        """Set the wanted number. `wish`: id of the balancer's request, 0 if no command waits. Thread-safe."""
        with self._lock:
            self._wanted, self._wish = servers, wish

    @property
    def busy(self) -> bool:
        """Whether a server is starting or leaving, or a new number is wanted: call `step` again soon."""
        return bool(self._starting or self._leaving or self._wanted is not None)

    def step(self) -> list[str]:
        """Start, check or drain one server without waiting; return the lines to print.

        Raises EaasError: a server cannot start or leave; the request is dropped.
        """
        try:
            return self._step()
        except EaasError as error:
            self._starting = self._leaving = None
            with self._lock:
                self._wanted = None
            self._refuse(str(error))
            raise

    def _refuse(self, reason: str) -> None:
        """Report the failure to the balancer, which then ends the waiting `eaas scale`."""
        balancer = self._balancer_address() if self._wish else None
        if balancer is None:
            return
        try:
            with BalancerClient(balancer, self._cluster.tls) as client:
                client.refuse_scale(self._wish, reason)
        except ClusterError as error:
            _log.debug("cannot report that scaling stopped: %s", error)

    def _step(self) -> list[str]:
        if child := self._starting:
            child.read()
            if child.address is None:
                if time.monotonic() > self._ready_by:
                    words = child.last_words()
                    child.end()
                    raise ClusterError(
                        f"{child.name} was not ready in time and was stopped; its last words: {words}"
                    )
                return []
            self._starting = None
            return [f"{child.name} (pid {child.pid}) serves"]
        if child := self._leaving:
            if child.running:
                return []
            self._leaving = None
            self._cluster.forget(child.name)
            return [f"{child.name} (pid {child.pid}) has left"]
        wanted, running = self._wanted, self._cluster.running_servers()
        if wanted is None:
            return []
        try:
            others = self._others()
        except ClusterError as error:
            _log.debug("other servers are unknown, trying again: %s", error)
            return []
        own = wanted - len(others)
        if own < 0:
            raise ClusterError(
                f"{counted(len(others), 'server')} started by hand: end one with `eaas drain`"
            )
        if len(running) < own:
            self._starting = self._cluster.add_server(others=others)
            self._ready_by = time.monotonic() + self._cluster.config.balancer.apply_timeout_s
            return [f"{self._starting.name} (pid {self._starting.pid}) starts"]
        if len(running) > own:
            last, balancer = running[-1], self._balancer_address()
            if balancer is None:
                return []
            with BalancerClient(balancer, self._cluster.tls) as client:
                client.drain(last.name)
            self._leaving = last
            return [f"{last.name} (pid {last.pid}) leaves"]
        # `want` may have set another number since then.
        with self._lock:
            if self._wanted == wanted:
                self._wanted = None
        return []
