"""Reachability of expert servers from this client, for its report to the monitor. Pure state (no I/O)."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from eaas.types import Member, ServerReach

__all__ = ["ReachBook"]

# Longest reason that the monitor accepts, in characters.
_MOST_REASON = 255


class _Connected(Protocol):
    server_id: str
    incarnation: int
    lost_reason: str | None


@dataclass(frozen=True)
class _Refusal:
    process: tuple[object, ...]
    reach: ServerReach


class ReachBook:
    """Records why this client is not connected to servers that it has tried to reach. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._refusals: dict[str, _Refusal] = {}

    def report(self, connections: Iterable[_Connected]) -> tuple[ServerReach, ...]:
        """Make the report to the monitor from the failures and these connections, sorted by server id.

        Args:
            connections: At most one per server.
        """
        with self._lock:
            found = {server: refusal.reach for server, refusal in self._refusals.items()}
        for one in connections:
            if one.lost_reason is None:
                found[one.server_id] = ServerReach(one.server_id, one.incarnation)
        return tuple(found[server] for server in sorted(found))

    def refusals(self) -> dict[str, str]:
        """Return the reasons why servers are not connected, by server id, for `Cluster.missing`."""
        with self._lock:
            return {server: refusal.reach.reason for server, refusal in self._refusals.items()}

    def connected(self, server_id: str) -> None:
        """Record that a server is connected now: the next report gives no reason for it."""
        with self._lock:
            self._refusals.pop(server_id, None)

    def failed(self, member: Member, why: str, *, lost: bool = False) -> bool:
        """Record a failed attempt to connect, or the loss of a connection, for the next report.

        Args:
            member: The server process.
            why: Reason, for people.
            lost: Whether an open connection was lost.

        Returns:
            Whether the report to the monitor changed.
        """
        printable = "".join(c if c.isprintable() else " " for c in why)
        reason = " ".join(printable.split())[:_MOST_REASON] or "no reason was given"
        with self._lock:
            before = self._refusals.get(member.id)
            if before is not None and before.process == member.process:
                lost = lost or before.reach.lost
            reach = ServerReach(member.id, member.incarnation, reason, lost)
            if before is not None and before.reach == reach:
                return False
            self._refusals[member.id] = _Refusal(member.process, reach)
            return True

    def keep(self, processes: Collection[tuple[object, ...]]) -> None:
        """Forget all server processes except these (`Member.process`), after a new membership view."""
        with self._lock:
            self._refusals = {s: r for s, r in self._refusals.items() if r.process in processes}
