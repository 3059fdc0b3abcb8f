"""The planner's judgement, by clients' connections, which servers get experts. No I/O, no clock.

Terms:
  missing: a client is not connected to a server, for any reason.
  cut: the connection has been missing for too long to wait for it.
  counted: a client that reports its reach and is not cut from every server. If a client is cut from all
    servers, the fault is its own, and no expert is moved for it.
  placed: a server that holds experts in the placement. The others are newcomers.
  partition: the servers that a client still reaches when it is cut from others. Each expert also needs its
    replicas among these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from balancer.planner.actions import Complain
from eaas.types import Member, ServerReach

__all__ = ["ReachTracker", "Verdict", "judge"]

# Wait for clients to connect to a new server: enough for a few attempts, even of a busy client.
_TRIES_S = 1.5
# Wait for a client that reports nothing about a server: more than the deadline of an attempt to connect.
_SILENT_S = 10.0

_MemberProcess = tuple[str, int, str, int, str]


@dataclass(frozen=True)
class Verdict:
    """Which servers get no experts and which need extra replicas, by what clients reach.

    Attributes:
        withheld: Servers that get no experts for now.
        partitions: Sets of servers, each of which needs replicas of every expert.
        cut_off: Clients that reach no server.
    """

    withheld: frozenset[str] = frozenset()
    partitions: frozenset[frozenset[str]] = frozenset()
    cut_off: frozenset[str] = frozenset()


def judge(
    cut: Mapping[str, AbstractSet[str]],
    missing: Mapping[str, AbstractSet[str]],
    servers: AbstractSet[str],
    placed: AbstractSet[str],
) -> Verdict:
    """Decide which servers are withheld and which partitions there are.

    A newcomer is withheld until every counted client is connected to it. A placed server is withheld once
    every counted client is cut from it. If only some clients are cut from it, it keeps serving the others,
    and the servers that the cut clients reach get the missing replicas.

    Args:
        cut: Servers that each client is cut from, by client that reports its reach.
        missing: Servers that each client is not connected to; a superset of `cut`.
        servers: Live servers.
        placed: Servers that hold experts.
    """
    counted = [client for client in cut if servers - cut[client]]
    if not counted:
        return Verdict(cut_off=frozenset(cut) if servers else frozenset())
    withheld = frozenset(
        server
        for server in servers
        if (
            all(server in cut[client] for client in counted)
            if server in placed
            else any(server in missing[client] for client in counted)
        )
    )
    left = {frozenset(servers - withheld - cut[c]) for c in counted if cut[c] - withheld}
    return Verdict(withheld, frozenset(left - {frozenset()}), frozenset(cut.keys() - {*counted}))


@dataclass(frozen=True)
class _Gap:
    """A missing connection between a client and a server, and since when it is missing."""

    since: float
    patience_s: float
    reason: str

    def is_over(self, now: float) -> bool:
        return now >= self.since + self.patience_s


@dataclass
class _Client:
    member: Member
    gaps: dict[str, _Gap] = field(default_factory=dict)
    servers: Mapping[str, _MemberProcess] = field(default_factory=dict)


class ReachTracker:
    """Tracks which servers clients report to reach, and how long connections have been missing.

    Args:
        grace_s: How long to wait for a client to reconnect to a server.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._clients: dict[str, _Client] = {}
        self._servers: dict[str, _MemberProcess] = {}
        self._withheld: set[_MemberProcess] = set()
        self._reported: set[tuple[_MemberProcess, _MemberProcess]] = set()

    def observe(self, clients: Iterable[Member], servers: Mapping[str, Member], now: float) -> None:
        """Record a cluster view, with clients' reports on the servers they reach; `verdict` then judges.

        Args:
            clients: Live clients of the cluster's model, including older releases that report nothing.
            servers: Live servers of that model, by id.
            now: Monotonic seconds.
        """
        processes = {server: member.process for server, member in servers.items()}
        if processes != self._servers:
            self._servers = processes
        before, self._clients = self._clients, {}
        for member in clients:
            if member.reach is None:
                continue
            known = before.get(member.id)
            if known is not None and known.member.process != member.process:
                known = None
            # Unchanged reports are not compared again, as there may be thousands of clients and servers.
            if (
                known is not None
                and known.member.reach is member.reach
                and known.servers is self._servers
            ):
                self._clients[member.id] = known
            else:
                gaps = self._gaps(member.reach, servers, known, now)
                self._clients[member.id] = _Client(member, gaps, self._servers)

    def _gaps(
        self,
        reach: Iterable[ServerReach],
        servers: Mapping[str, Member],
        known: _Client | None,
        now: float,
    ) -> dict[str, _Gap]:
        reports = {(r.server_id, r.server_incarnation): r for r in reach}
        gaps = {}
        for server_id, server in servers.items():
            report = reports.get((server_id, server.incarnation))
            if report is not None and not report.reason:
                continue
            since = now
            if known is not None and known.servers.get(server_id) == server.process:
                since = known.gaps[server_id].since if server_id in known.gaps else now
            if report is None:
                gaps[server_id] = _Gap(since, _SILENT_S, f"no attempt in {_SILENT_S:.0f} s")
            else:
                patience_s = self._grace_s if report.lost else _TRIES_S
                gaps[server_id] = _Gap(since, patience_s, report.reason)
        return gaps

    def verdict(self, placed: AbstractSet[str] | None, now: float) -> Verdict:
        """Return which servers get no experts now, and which clients need extra replicas (see `judge`).

        `placed` None means all servers, because the first placement waits for no client.
        """
        missing = {c: client.gaps.keys() for c, client in self._clients.items()}
        servers = self._servers.keys()
        placed = servers if placed is None else placed
        found = judge(self._cut(now), missing, servers, placed)
        if self._clients.keys() == found.cut_off:
            # While no client reaches any server, a withheld newcomer stays withheld.
            newcomers = {s for s in servers - placed if self._servers[s] in self._withheld}
            return replace(found, withheld=frozenset(newcomers))
        self._withheld = {self._servers[s] for s in found.withheld}
        return found

    def _cut(self, now: float) -> dict[str, set[str]]:
        return {
            c: {s for s, gap in client.gaps.items() if gap.is_over(now)}
            for c, client in self._clients.items()
        }

    def due_at(self) -> list[float]:
        """Times at which the verdict may change without an event, as a missing connection counts as cut."""
        return [g.since + g.patience_s for c in self._clients.values() for g in c.gaps.values()]

    def complaints(self, verdict: Verdict, now: float) -> list[Complain]:
        """Return new messages for the log; each is repeated only after the connection worked in between."""
        open_now = {
            (client.member.process, self._servers[s]): (c, s, gap.reason)
            for c, client in self._clients.items()
            for s, gap in client.gaps.items()
            if gap.is_over(now)
        }
        complaints = []
        for key in sorted(open_now.keys() - self._reported):
            client, server, reason = open_now[key]
            if server in verdict.withheld:
                text = f"attention client {client} cannot reach it: {reason}"
                complaints.append(Complain(text, refused=server))
                continue
            effect = f"its experts are loaded where {client} reaches them"
            if client in verdict.cut_off:
                effect = "it reaches no server: no experts move for it"
            text = f"attention client {client} cannot reach {server}: {reason}; {effect}"
            complaints.append(Complain(text))
        self._reported = set(open_now)
        return complaints
