"""Which of the cluster's monitors a member talks to: one of them leads, the others stand by."""

from __future__ import annotations

import threading
import time
from typing import Any

import grpc

from eaas.errors import ClusterError
from eaas.grpc_client import Backoff
from eaas.grpc_quiet import QuietChannel
from eaas.rpc.v1 import monitor_pb2, monitor_pb2_grpc
from eaas.tls import Identity
from eaas.types import Member, Role

__all__ = ["LEADER_KEY", "MonitorLine", "Monitors", "ask_members", "tls_hint"]

LEADER_KEY = "eaas-monitor-leader"
"""Metadata of a refusal (UNAVAILABLE): host:port of the monitor that leads."""

# Whatever else a monitor answers, it answers as the leader.
_AWAY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
)


class MonitorLine:
    """The way to one monitor.

    Attributes:
        address: host:port.
        stub: Of its service.
    """

    def __init__(self, address: str, tls: Identity | None = None) -> None:
        self.address = address
        self._tls = tls
        self._lock = threading.Lock()
        self._former: Any = None
        self._connect()

    def _connect(self) -> None:
        self._shown = self._tls.version if self._tls else 0
        self._channel = QuietChannel(self.address, Role.MONITOR.value, self._tls)
        self.stub: Any = monitor_pb2_grpc.MonitorServiceStub(self._channel)

    def renew(self) -> None:
        """Shows the new certificate from now on, if there is one. Running calls go on."""
        with self._lock:
            if self._tls is None or self._tls.version == self._shown:
                return
            # The last one stays for now: another thread may be about to call on it.
            if self._former is not None:
                self._former.close()
            self._former = self._channel
            self._connect()

    def members(self, timeout_s: float) -> list[Member] | None:
        """Everybody, with their loads of this moment; None where the monitor ends without a word.

        Raises:
            grpc.RpcError: It does not answer in time, or does not lead.
        """
        call = self.stub.Watch(monitor_pb2.WatchRequest(knows_left=True), timeout=timeout_s)
        try:
            for response in call:
                if response.WhichOneof("kind") == "snapshot":
                    return [Member.from_proto(message) for message in response.snapshot.members]
        finally:
            call.cancel()
        return None

    def close(self) -> None:
        """Ends the calls on it."""
        with self._lock:
            self._channel.close()
            if self._former is not None:
                self._former.close()


class Monitors:
    """Lines to all monitors, of which one is the present one. Any thread may use it.

    Args:
        addresses: "host:port", or "host:port,host:port" where there are several. No other address is ever
            connected to, whatever a monitor says.
        tls: Who calls; None: plain text.
    """

    def __init__(self, addresses: str, tls: Identity | None = None) -> None:
        names = [address.strip() for address in addresses.split(",")]
        self._lines = [MonitorLine(address, tls) for address in dict.fromkeys(names)]
        self._lock = threading.Lock()
        self._now = self._lines[0]
        # The last one that did not answer: whoever still takes it for the leader is behind.
        self._silent: MonitorLine | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of all of them."""
        return tuple(line.address for line in self._lines)

    @property
    def now(self) -> MonitorLine:
        """The line to use."""
        return self._now

    def leave(self, line: MonitorLine, error: Exception) -> bool:
        """A call on `line` failed: use another one from now on, unless that was the leader's own answer.

        The other is the one that the monitor named as the leader, else the next one. Says whether there is
        another one.
        """
        if isinstance(error, grpc.Call) and error.code() not in _AWAY:
            return False
        line.renew()
        named = _leader(error)
        with self._lock:
            if line is not self._now:
                return False
            if named is None:
                self._silent = line
            following = self._lines[(self._lines.index(line) + 1) % len(self._lines)]
            others = (o for o in self._lines if o is not line and o is not self._silent)
            self._now = next((o for o in others if o.address == named), following)
            return self._now is not line

    def close(self) -> None:
        """Closes all lines."""
        for line in self._lines:
            line.close()


def ask_members(monitors: Monitors, timeout_s: float) -> list[Member]:
    """Everybody, with their loads of this moment, as whichever monitor leads says. A takeover is waited for.

    Raises:
        ClusterError: None of them answered in time.
    """
    deadline = time.monotonic() + timeout_s
    # One that takes the question and is silent leaves time for the others.
    share_s = timeout_s / len(monitors.addresses)
    backoff = Backoff()
    while True:
        line, left_s = monitors.now, deadline - time.monotonic()
        cause: grpc.RpcError | None = None
        try:
            members = line.members(min(share_s, left_s))
            if members is not None:
                return members
            why = f"the monitor at {line.address} stops"
        except grpc.RpcError as error:
            monitors.leave(line, error)
            cause = error
            why = (
                f"the monitor at {line.address} does not answer: {error.details()}{tls_hint(error)}"
            )
        pause_s = backoff.next_s()
        if time.monotonic() + pause_s >= deadline:
            raise ClusterError(f"{why}; check the address and that the monitor runs") from cause
        time.sleep(pause_s)


def tls_hint(error: grpc.RpcError) -> str:
    """What to add to the words of a failed call where the server seems to have TLS and the caller has not."""
    closed = error.code() is grpc.StatusCode.UNAVAILABLE and "Socket closed" in error.details()
    return " (a server with TLS closes connections without it: give --tls DIR)" if closed else ""


def _leader(error: Exception) -> str | None:
    if not isinstance(error, grpc.Call):
        return None
    return next((str(v) for key, v in error.trailing_metadata() or () if key == LEADER_KEY), None)
