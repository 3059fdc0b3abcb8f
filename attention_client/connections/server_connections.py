"""A client's connections to all expert servers, opened, replaced and reopened by background threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import grpc

from attention_client.connections.connection import Connection
from attention_client.connections.deadlines import ServiceTimes
from attention_client.connections.opening import CONNECT_S, open_connection
from attention_client.connections.reach import ReachBook
from attention_client.connections.transports import opener
from attention_client.telemetry.metrics import ClientMetrics
from eaas.config import AttentionClientConfig
from eaas.errors import ConnectionLostError, EaasError
from eaas.log import get_logger
from eaas.membership.session import MemberSession, MembershipView
from eaas.net.grpc_client import Backoff
from eaas.net.tls import Identity
from eaas.types import Member, MemberState, ModelShape, Role, ServerReach

__all__ = ["ServerConnections"]

_log = get_logger(__name__)
_RECONNECT_S = 0.25
_RECONNECT_MOST_S = 2.0
# JOINING is included, because a server gets experts only once its clients are connected to it.
_USABLE = (MemberState.JOINING, MemberState.SERVING, MemberState.SUSPECT, MemberState.DRAINING)


class ServerConnections:
    """Keeps one connection to each usable expert server. Methods may be called from several threads.

    No connection is opened before `start`.

    Args:
        client_id: Client that connects.
        shape: Model of the client.
        config: Transport, slots.
        metrics: Metrics of the client.
        changed: Lock of the connections; notified by `on_change`.
        on_change: Called with the lock held when a connection was added or lost.
        tls: Identity of the client; None: plain text.

    Raises:
        ConfigError: The transport is not installed.
    """

    def __init__(
        self,
        client_id: str,
        shape: ModelShape,
        config: AttentionClientConfig,
        metrics: ClientMetrics,
        changed: threading.Condition,
        on_change: Callable[[], None],
        tls: Identity | None,
    ) -> None:
        self._outcomes = metrics.outcomes
        self._changed = changed
        self._on_change = on_change
        self._open = partial(
            open_connection,
            open_link=opener(config.transport),
            client_id=client_id,
            shape=shape,
            config=config,
            metrics=metrics,
            on_lost=self.lost,
            tls=tls,
        )
        self._members: MembershipView | None = None
        self._connections: dict[str, Connection] = {}
        # The process (`Member.process`) that each connection leads to, and the one being connected to.
        self._processes: dict[str, tuple[object, ...]] = {}
        self._connecting: dict[str, tuple[object, ...]] = {}
        # Former connections that are being closed.
        self._closing: dict[str, threading.Event] = {}
        self._reach = ReachBook()
        # Kept across restarts of a server, because a new process is as fast as the old one.
        self._service_times: dict[str, ServiceTimes] = {}
        self._session: MemberSession | None = None
        self._started = threading.Event()
        self._closed = threading.Event()

    def start(self, session: MemberSession) -> None:
        """Allow connections to be opened, as the member of this session. Called once, by `Cluster`."""
        self._session = session
        self._started.set()

    def all(self) -> tuple[Connection, ...]:
        """Return the current connection of each connected server; lost ones are dropped already."""
        with self._changed:
            return tuple(self._connections.values())

    def of(self, servers: Sequence[str]) -> tuple[Connection | None, ...]:
        """Return the connections to these servers for the view, None if not connected; the lock is held."""
        return tuple(self._connections.get(server) for server in servers)

    def live(self) -> set[str]:
        """Return the servers with a live connection, to adopt a placement by; the lock is held."""
        return {s for s, c in self._connections.items() if c.lost_reason is None}

    def reach(self) -> tuple[ServerReach, ...]:
        """Make the report to the monitor: which servers are connected, and why not, sorted by server id."""
        return self._reach.report(self.all())

    def refusals(self) -> dict[str, str]:
        """Return the reasons why servers are not connected, by server id, for `Cluster.missing`."""
        return self._reach.refusals()

    def follow(self, members: MembershipView) -> None:
        """Apply a new membership view from the monitor.

        Connects to new servers, and drops connections to former processes and to dead servers that owe an
        answer.
        """
        self._members = members
        servers = [m for m in members.members.values() if m.role is Role.EXPERT_SERVER]
        self._reach.keep({m.process for m in servers if m.state in _USABLE})
        for member in servers:
            with self._changed:
                connection = self._connections.get(member.id)
                stale = connection is not None and self._processes[member.id] != member.process
            # A server that answers this client stays connected, even if the monitor cannot reach it. A server
            # that left takes back its slots on its own.
            silent = member.state.is_gone and connection and connection.owes_answer()
            if connection is not None and (stale or silent):
                connection.lose(f"the monitor says {member.state.value}")
            if member.state.is_gone:
                self._outcomes.forget(member.id)
            if member.state in _USABLE:
                self._connect_soon(member)

    def lost(self, connection: Connection) -> None:
        """Handle a loss (`on_lost`): drop the connection, wake layer calls to resend, and reconnect."""
        _log.info("%s: connection lost: %s", connection.server_id, connection.lost_reason)
        with self._changed:
            if self._connections.get(connection.server_id) is connection:
                del self._connections[connection.server_id]
                member = self._usable(connection.server_id)
                if member is not None and member.process == self._processes[member.id]:
                    self._reach.failed(member, str(connection.lost_reason), lost=True)
            others = tuple(self._connections.values())
            closed = self._closing.setdefault(connection.server_id, threading.Event())
            self._on_change()
        self._report_now()
        # Wake layer calls that wait on other servers, so that they resend their lost pairs now.
        for other in others:
            other.wake()
        threading.Thread(
            target=self._after_loss, args=(connection, closed), name="after-loss", daemon=True
        ).start()

    def stop(self) -> None:
        """Stop opening connections, because this client leaves; existing ones stay open until `close`."""
        self._closed.set()

    def close(self) -> None:
        """Close all connections and give their slots back to the servers; call `stop` first."""
        for connection in self.all():
            connection.close()

    def _report_now(self) -> None:
        if self._session is not None:
            self._session.report_now()

    def _connect_soon(self, member: Member) -> None:
        with self._changed:
            known = self._connections.get(member.id)
            if self._closed.is_set() or self._connecting.get(member.id) == member.process:
                return
            if known is not None and self._processes[member.id] == member.process:
                return
            self._connecting[member.id] = member.process
        threading.Thread(
            target=self._connect, args=(member,), name=f"connect-{member.id}", daemon=True
        ).start()

    def _still_wanted(self, member: Member) -> bool:
        current = self._usable(member.id)
        return (
            not self._closed.is_set() and current is not None and current.process == member.process
        )

    def _usable(self, server_id: str) -> Member | None:
        member = self._members.members.get(server_id) if self._members else None
        return member if member is not None and member.state in _USABLE else None

    def _connect(self, member: Member) -> None:
        self._started.wait()
        backoff = Backoff(_RECONNECT_S, _RECONNECT_MOST_S)
        try:
            while self._still_wanted(member):
                try:
                    self._connect_once(member)
                    return
                except (grpc.RpcError, EaasError) as error:
                    reason = str(error.details() if isinstance(error, grpc.Call) else error)
                except Exception as error:  # noqa: BLE001 (logged; other servers are not affected)
                    reason = repr(error)
                    _log.exception("%s: not connected", member.id)
                if self._reach.failed(member, reason):
                    _log.warning("%s: not connected, retrying: %s", member.id, reason)
                    self._report_now()
                self._closed.wait(backoff.next_s())
        finally:
            with self._changed:
                if self._connecting.get(member.id) == member.process:
                    del self._connecting[member.id]
            # A new view or a loss may have started no other thread, because this one was still connecting.
            if self._still_wanted(member):
                self._connect_soon(member)

    def _connect_once(self, member: Member) -> None:
        closing = self._closing.get(member.id)
        if closing is not None:
            # The former connection may still write into slots that the server would grant again.
            closing.wait(CONNECT_S)
        assert self._session is not None
        connection = self._open(
            member, self._session.incarnation, lambda made: self._add(member, made)
        )
        if connection.lost_reason is not None:
            raise ConnectionLostError(connection.lost_reason)
        with self._changed:
            added = self._connections.get(member.id) is connection
        if not (added and self._still_wanted(member)):
            connection.lose("another process of the server began")
        else:
            _log.info("%s: connected (%s)", member.id, connection.transport)

    def _add(self, member: Member, connection: Connection) -> None:
        with self._changed:
            if not self._still_wanted(member):
                # A connection to the server's next process may exist already.
                return
            if self._processes.get(member.id, member.process) != member.process:
                # The new process may have a lower incarnation, and the old totals would hide its own.
                self._outcomes.forget(member.id)
            connection.service = self._service_times.setdefault(member.id, connection.service)
            self._processes[member.id] = member.process
            self._connections[member.id] = connection
            self._reach.connected(member.id)
            self._on_change()
        self._report_now()

    def _after_loss(self, connection: Connection, closed: threading.Event) -> None:
        """Close a lost connection, then reconnect if the server is still usable; runs in its own thread."""
        try:
            connection.close()
        finally:
            with self._changed:
                self._closing.pop(connection.server_id, None)
            closed.set()
        self._closed.wait(_RECONNECT_S)
        if (member := self._usable(connection.server_id)) is not None:
            self._connect_soon(member)
