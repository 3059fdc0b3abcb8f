"""Server health in one layer call: which servers to ask, avoid and blame."""

from __future__ import annotations

from attention_client.connections.connection import Connection
from attention_client.layer_call.shared import ClusterView, Dispatcher
from attention_client.telemetry.request_outcomes import failure

__all__ = ["ServerHealth"]


class ServerHealth:
    """Failures of the servers in one call.

    Args:
        shared: Shared by all calls.

    Attributes:
        avoided: Connections that failed in this call, with the reason; asked again only as a last resort.
        timeouts: Timeouts of each connection in this call.
    """

    def __init__(self, shared: Dispatcher) -> None:
        self._shared = shared
        self.avoided: dict[Connection, str] = {}
        self.timeouts: dict[Connection, int] = {}
        self._blamed: set[Connection] = set()

    def healthy(self, view: ClusterView) -> list[bool]:
        """Whether each server is connected, did not fail in this call and owes no late answer."""
        avoided = self.avoided
        return [
            c is not None and c.lost_reason is None and c not in avoided and not c.owes_answer()
            for c in view.connections
        ]

    def kept(self, view: ClusterView, now: float) -> list[bool]:
        """Whether each server is not ejected."""
        out = self._shared.ejections.out
        return [not out(server, now) for server in view.placement.servers]

    def give_up(self, connection: Connection, reason: str, kind: str, *, blame: bool) -> None:
        """Count a failed request and avoid the server for the rest of the call."""
        if blame:
            self.blame(connection)
        self.avoided[connection] = reason
        self._shared.metrics.outcomes.count(connection, failure(kind, blame=blame))
        self._shared.metrics.failovers.labels(kind).inc()

    def blame(self, connection: Connection) -> None:
        """Count one failure of a server; several in one call count once."""
        if connection in self._blamed:
            return
        self._blamed.add(connection)
        shared = self._shared
        servers = shared.replicas.view().placement.servers
        if shared.ejections.failed(connection.server_id, servers, shared.clock()):
            shared.metrics.ejections.labels("failures").inc()
