"""In the monitor: decides when clients' failure reports make a server SUSPECT despite its heartbeats. Pure.

Terms:
  report: one client's last report about one incarnation of a server. It is *bad* if requests have failed
    since the last answer, else *good*.
  recent: a good report counts for a short time, since a client that stops sending learns nothing. A bad one
    counts for a long time, since a client without answers stops sending for a while.
  accused: all recent reports about the server are bad. A single client that is cut off from a server that
    answers others accuses no server.

    not accused ---- all recent reports bad for `patience_s` ------------------------> accused
        ^            (and `memory_s` since the last accusation was cleared)              |
        +------------ a good report, or no recent bad one is left -----------------------+
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["FailureReports", "RequestTotals"]

# Shares of a lease. Clients report with every heartbeat, so a good report soon corrects a bad one.
_PATIENCE_SHARE = 0.75
_WINDOW_SHARE = 2.0
_MEMORY_SHARE = 10.0


@dataclass(frozen=True)
class RequestTotals:
    """A client's totals of requests to one incarnation of a server.

    Attributes:
        outcomes: Requests that ended, with or without a result; rises from report to report.
        answered: Requests with a result.
        failures_since_answer: Failures since the last result.
    """

    outcomes: int
    answered: int
    failures_since_answer: int


@dataclass(frozen=True)
class _Report:
    totals: RequestTotals
    heard_at: float
    # Time since when no request was answered; None if the report is good.
    bad_since: float | None


@dataclass
class _ServerReports:
    reports: dict[str, _Report] = field(default_factory=dict)
    accusation: str | None = None
    cleared_at: float = -math.inf


class FailureReports:
    """Live clients' reports about live servers. The owner calls `forget` for DEAD and LEFT members.

    Args:
        lease_s: Lease in seconds; the other times are shares of it.
    """

    def __init__(self, lease_s: float) -> None:
        self.patience_s = _PATIENCE_SHARE * lease_s
        self.window_s = _WINDOW_SHARE * lease_s
        self.memory_s = _MEMORY_SHARE * lease_s
        self._servers: dict[str, _ServerReports] = {}
        # Servers with a recent bad report. Only their accusations change with time.
        self._open: dict[str, None] = {}

    def __len__(self) -> int:
        """Number of stored reports: at most one per client and server."""
        return sum(len(server.reports) for server in self._servers.values())

    def record(self, server_id: str, client_id: str, totals: RequestTotals, now: float) -> None:
        """Record a client's report about a server if it is newer than the last one, for `accusation`."""
        reports = self._servers.setdefault(server_id, _ServerReports()).reports
        known = reports.get(client_id)
        if known is not None and totals.outcomes <= known.totals.outcomes:
            return
        bad_since = None
        if totals.failures_since_answer:
            bad_since = now
            if known is not None and totals.answered == known.totals.answered:
                bad_since = now if known.bad_since is None else known.bad_since
            self._open[server_id] = None
        reports[client_id] = _Report(totals, now, bad_since)

    def open_servers(self) -> tuple[str, ...]:
        """List the servers with a recent bad report; each tick asks for their `accusation` again."""
        return tuple(self._open)

    def accusation(self, server_id: str, now: float) -> str | None:
        """Explain why clients make a server SUSPECT; None if they do not. Only this advances the time."""
        server = self._servers.get(server_id)
        if server is None:
            return None
        bad = [
            report.bad_since
            for report in server.reports.values()
            if report.bad_since is not None and now - report.heard_at < self.memory_s
        ]
        good = any(
            report.bad_since is None and now - report.heard_at < self.window_s
            for report in server.reports.values()
        )
        if good or not bad:
            if server.accusation is not None:
                server.accusation, server.cleared_at = None, now
            if not bad:
                self._open.pop(server_id, None)
        elif (
            server.accusation is None
            and now - max(bad) >= self.patience_s
            and now - server.cleared_at >= self.memory_s
        ):
            clients = "client gets" if len(bad) == 1 else "clients get"
            server.accusation = f"{len(bad)} of {len(bad)} {clients} no answers"
        return server.accusation

    def skip(self, seconds: float) -> None:
        """Shift the times of all reports, after the monitor was paused for this long and heard no member."""
        for server in self._servers.values():
            server.cleared_at += seconds
            for client_id, report in server.reports.items():
                bad_since = None if report.bad_since is None else report.bad_since + seconds
                server.reports[client_id] = _Report(
                    report.totals, report.heard_at + seconds, bad_since
                )

    def forget(self, member_id: str) -> None:
        """Drop the reports about a member and by it, because its incarnation has ended."""
        self._servers.pop(member_id, None)
        self._open.pop(member_id, None)
        for server in self._servers.values():
            server.reports.pop(member_id, None)
