"""Which of the cluster's monitors a member talks to: one of them leads, the others stand by."""

from __future__ import annotations

import threading
from typing import Any

import grpc

from eaas.grpc_client import channel
from eaas.rpc.v1 import monitor_pb2_grpc

__all__ = ["LEADER_KEY", "MonitorLine", "Monitors"]

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

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = channel(address)
        self.stub: Any = monitor_pb2_grpc.MonitorServiceStub(self._channel)

    def close(self) -> None:
        """Ends the calls on it."""
        self._channel.close()


class Monitors:
    """Lines to all monitors, of which one is the present one. Any thread may use it.

    Args:
        addresses: "host:port", or "host:port,host:port" where there are several. No other address is ever
            connected to, whatever a monitor says.
    """

    def __init__(self, addresses: str) -> None:
        names = [address.strip() for address in addresses.split(",")]
        self._lines = [MonitorLine(address) for address in dict.fromkeys(names)]
        self._lock = threading.Lock()
        self._now = self._lines[0]
        # The last one that did not answer: whoever still takes it for the leader is behind.
        self._silent: MonitorLine | None = None

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


def _leader(error: Exception) -> str | None:
    if not isinstance(error, grpc.Call):
        return None
    return next((str(v) for key, v in error.trailing_metadata() or () if key == LEADER_KEY), None)
