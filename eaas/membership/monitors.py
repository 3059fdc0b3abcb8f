"""A process's connections to the cluster's monitors, of which one leads and the others stand by."""

from __future__ import annotations

import threading
import time
from typing import Any

import grpc

from eaas.errors import ClusterError
from eaas.membership.cluster_view import members_of
from eaas.net.async_channel import AsyncChannel
from eaas.net.grpc_client import Backoff
from eaas.net.tls import Identity
from eaas.rpc.v1 import monitor_pb2, monitor_pb2_grpc
from eaas.types import Member, Role

__all__ = ["LEADER_KEY", "MonitorConnection", "Monitors", "ask_members", "tls_hint"]

LEADER_KEY = "eaas-monitor-leader"
"""Metadata of a refusal (UNAVAILABLE): host:port of the leader."""

# A call with one of these statuses did not reach the leader.
_AWAY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)


class MonitorConnection:
    """gRPC connection of a member to one monitor.

    Attributes:
        address: host:port.
        stub: Client stub of its service.
    """

    def __init__(self, address: str, tls: Identity | None = None) -> None:
        self.address = address
        self._tls = tls
        self._lock = threading.Lock()
        self._former: Any = None
        self._connect()

    def _connect(self) -> None:
        self._shown = self._tls.version if self._tls else 0
        self._channel = AsyncChannel(self.address, Role.MONITOR.value, self._tls)
        self.stub: Any = monitor_pb2_grpc.MonitorServiceStub(self._channel)

    def renew(self) -> None:
        """After a failed call, reconnect if the TLS certificate has changed. Running calls continue."""
        with self._lock:
            if self._tls is None or self._tls.version == self._shown:
                return
            # Another thread may be about to use the last channel.
            if self._former is not None:
                self._former.close()
            self._former = self._channel
            self._connect()

    def members(self, timeout_s: float) -> list[Member] | None:
        """Read all members with their current loads from this monitor; None if it ends the stream first.

        Raises:
            grpc.RpcError: It does not answer in time, or is not the leader.
        """
        request = monitor_pb2.WatchRequest(knows_left=True, knows_models=True, knows_frontends=True)
        call = self.stub.Watch(request, timeout=timeout_s)
        try:
            for response in call:
                if response.WhichOneof("kind") == "snapshot":
                    return members_of(response.snapshot)
        finally:
            call.cancel()
        return None

    def close(self) -> None:
        """Close the channel to the monitor, which ends its calls."""
        with self._lock:
            self._channel.close()
            if self._former is not None:
                self._former.close()


class Monitors:
    """Connections to all monitors, of which one is current. Thread-safe.

    Args:
        addresses: "host:port", or "host:port,host:port" for several monitors. No other address is used, even
            if a monitor names one.
        tls: Identity of the caller; None means plain text.
    """

    def __init__(self, addresses: str, tls: Identity | None = None) -> None:
        names = [address.strip() for address in addresses.split(",")]
        self._connections = [MonitorConnection(address, tls) for address in dict.fromkeys(names)]
        self._lock = threading.Lock()
        self._now = self._connections[0]
        # The last monitor that did not answer. A monitor that names it as the leader is out of date.
        self._silent: MonitorConnection | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of all monitors."""
        return tuple(monitor.address for monitor in self._connections)

    @property
    def now(self) -> MonitorConnection:
        """The current connection: calls go to this monitor."""
        return self._now

    def leave(self, monitor: MonitorConnection, error: Exception) -> bool:
        """Switch to another monitor after a failed call, unless the leader itself gave the error.

        The next monitor is the leader named in the error, else the next in the list.

        Returns:
            Whether the current connection changed.
        """
        if isinstance(error, grpc.Call) and error.code() not in _AWAY:
            return False
        monitor.renew()
        named = _leader(error)
        with self._lock:
            if monitor is not self._now:
                return False
            if named is None:
                self._silent = monitor
            following = self._connections[
                (self._connections.index(monitor) + 1) % len(self._connections)
            ]
            others = (o for o in self._connections if o is not monitor and o is not self._silent)
            self._now = next((o for o in others if o.address == named), following)
            return self._now is not monitor

    def close(self) -> None:
        """Close the connections to all monitors."""
        for monitor in self._connections:
            monitor.close()


def ask_members(monitors: Monitors, timeout_s: float) -> list[Member]:
    """Read all members with their current loads from the leading monitor; wait for a takeover.

    For the autoscaler, and for expert servers that have not registered yet.

    Raises:
        ClusterError: No monitor answered in time.
    """
    deadline = time.monotonic() + timeout_s
    # A silent monitor must leave time for the others.
    share_s = timeout_s / len(monitors.addresses)
    backoff = Backoff()
    while True:
        monitor, left_s = monitors.now, deadline - time.monotonic()
        cause: grpc.RpcError | None = None
        try:
            members = monitor.members(min(share_s, left_s))
            if members is not None:
                return members
            why = f"the monitor at {monitor.address} stops"
        except grpc.RpcError as error:
            monitors.leave(monitor, error)
            cause = error
            why = f"the monitor at {monitor.address} does not answer: {error.details()}{tls_hint(error)}"
        pause_s = backoff.next_s()
        if time.monotonic() + pause_s >= deadline:
            raise ClusterError(f"{why}; check the address and that the monitor runs") from cause
        time.sleep(pause_s)


def tls_hint(error: grpc.RpcError) -> str:
    """Return a hint for the error of a failed call if only the called server seems to use TLS."""
    closed = error.code() is grpc.StatusCode.UNAVAILABLE and "Socket closed" in error.details()
    return " (a server with TLS closes connections without it: give --tls DIR)" if closed else ""


def _leader(error: Exception) -> str | None:
    if not isinstance(error, grpc.Call):
        return None
    return next((str(v) for key, v in error.trailing_metadata() or () if key == LEADER_KEY), None)
