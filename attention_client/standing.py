"""How servers stand in one layer call: whom to ask, whom to avoid, whom to blame."""

from __future__ import annotations

from attention_client.connection import Connection
from attention_client.outcomes import failure
from attention_client.shared import ClusterView, Dispatcher

__all__ = ["Standing"]


class Standing:
    """What the servers did in one call.

    Args:
        shared: Of all calls.

    Attributes:
        avoided: Connections that failed in this call, and why; asked again only when nobody else is left.
        timeouts: How often a connection's time was over in this call.
    """

    def __init__(self, shared: Dispatcher) -> None:
        self._shared = shared
        self.avoided: dict[Connection, str] = {}
        self.timeouts: dict[Connection, int] = {}
        self._blamed: set[Connection] = set()

    def sound(self, view: ClusterView) -> list[bool]:
        """Servers that are there, did not fail in this call and owe no answer to an earlier one."""
        avoided = self.avoided
        return [
            c is not None and c.lost_reason is None and c not in avoided and not c.owes_answer()
            for c in view.connections
        ]

    def kept(self, view: ClusterView, now: float) -> list[bool]:
        """Servers that are not ejected."""
        out = self._shared.ejections.out
        return [not out(server, now) for server in view.placement.servers]

    def give_up(self, connection: Connection, reason: str, kind: str, *, blame: bool) -> None:
        """A request failed: count it, and avoid the server for the rest of the call."""
        if blame:
            self.blame(connection)
        self.avoided[connection] = reason
        self._shared.metrics.outcomes.count(connection, failure(kind, blame=blame))
        self._shared.metrics.failovers.labels(kind).inc()

    def blame(self, connection: Connection) -> None:
        """Count a failure; what several parts of a call meet is one."""
        if connection in self._blamed:
            return
        self._blamed.add(connection)
        shared = self._shared
        servers = shared.replicas.view().placement.servers
        if shared.ejections.failed(connection.server_id, servers, shared.clock()):
            shared.metrics.ejections.labels("failures").inc()
