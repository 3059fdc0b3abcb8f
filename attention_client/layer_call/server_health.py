"""Server health within one layer call: which expert servers to ask, avoid and blame."""

from __future__ import annotations

from attention_client.connections.connection import Connection
from attention_client.layer_call.shared import ClusterView, Dispatcher
from attention_client.telemetry.request_outcomes import failure

__all__ = ["ServerHealth"]


class ServerHealth:
    """Tracks the servers' failures in one layer call, and counts them towards ejection from later ones.

    Args:
        shared: State shared by all calls.

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
        """Return whether to ask each server first: connected, not failed in this call, owes no answer."""
        avoided = self.avoided
        return [
            c is not None and c.lost_reason is None and c not in avoided and not c.owes_answer()
            for c in view.connections
        ]

    def kept(self, view: ClusterView, now: float) -> list[bool]:
        """Return whether each server is not ejected, for failures or slowness in any call of this client."""
        out = self._shared.ejections.out
        return [not out(server, now) for server in view.placement.servers]

    def give_up(
        self, connection: Connection, reason: str, kind: str, *, blame: bool, avoid: bool = True
    ) -> None:
        """Count a failed request. With `avoid`, avoid its server for the rest of the call.

        With `blame`, also count it towards ejection.
        """
        if blame:
            self.blame(connection)
        if avoid:
            self.avoided[connection] = reason
        self._shared.metrics.outcomes.count(connection, failure(kind, blame=blame))
        self._shared.metrics.failovers.labels(kind).inc()

    def blame(self, connection: Connection) -> None:
        """Count a failure towards ejecting the server from all calls for a while; once per call at most."""
        if connection in self._blamed:
            return
        self._blamed.add(connection)
        shared = self._shared
        servers = shared.replicas.view().placement.servers
        if shared.ejections.failed(connection.server_id, servers, shared.clock()):
            shared.metrics.ejections.labels("failures").inc()
