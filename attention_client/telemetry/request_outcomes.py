"""Outcomes of this client's requests by expert server, reported to the monitor.

Heartbeats alone do not reveal a server that is alive but answers no requests; its clients notice.
"""

from __future__ import annotations

import enum
import threading
from dataclasses import dataclass, field
from typing import Protocol

from eaas.rpc.v1 import monitor_pb2 as pb

__all__ = ["Asked", "Outcome", "OutcomeTally"]


class Outcome(enum.IntEnum):
    """How a request to an expert server ended (`ServerOutcomes` in `monitor.proto`)."""

    ANSWERED = 0
    TIMED_OUT = 1
    LOST = 2
    REFUSED = 3
    FAILED = 4
    CORRUPT = 5
    HEDGED_AWAY = 6


# Module names, because looking up an enum member costs more than counting.
_ANSWERED, _REFUSED = Outcome.ANSWERED, Outcome.REFUSED


class Asked(Protocol):
    """The server process that a request was sent to, as identified by its connection."""

    server_id: str
    incarnation: int


@dataclass(slots=True)
class _Totals:
    incarnation: int
    ended: list[int] = field(default_factory=lambda: [0] * len(Outcome))
    failures_since_answer: int = 0


class OutcomeTally:
    """Counts request outcomes for the current process of each expert server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, _Totals] = {}
        self._failed = threading.Event()

    def count(self, asked: Asked, outcome: Outcome, requests: int = 1) -> None:
        """Count ended requests; a failure wakes the reporter. Ignores former processes of the server."""
        with self._lock:
            totals = self._totals.get(asked.server_id)
            if totals is None or totals.incarnation < asked.incarnation:
                totals = self._totals[asked.server_id] = _Totals(asked.incarnation)
            elif totals.incarnation > asked.incarnation:
                return
            totals.ended[outcome] += requests
            if outcome is _ANSWERED:
                totals.failures_since_answer = 0
                return
            if outcome is _REFUSED:
                return
            totals.failures_since_answer += requests
        self._failed.set()

    def forget(self, server_id: str) -> None:
        """Drop the totals of a server, because it is dead or its process was replaced."""
        with self._lock:
            self._totals.pop(server_id, None)

    def wait_for_failure(self, timeout_s: float) -> None:
        """Make the reporter sleep until a request fails (since the last wait) or the timeout."""
        self._failed.wait(timeout_s)
        self._failed.clear()

    def wake(self) -> None:
        """End the reporter's `wait_for_failure` now, because the client leaves."""
        self._failed.set()

    def read(self) -> list[pb.ServerOutcomes]:
        """Return the current totals for the report to the monitor, one message per server."""
        with self._lock:
            return [
                pb.ServerOutcomes(
                    server_id=server_id,
                    server_incarnation=totals.incarnation,
                    failures_since_answer=totals.failures_since_answer,
                    **{o.name.lower(): totals.ended[o] for o in Outcome},
                )
                for server_id, totals in self._totals.items()
            ]
