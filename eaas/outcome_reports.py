"""Telling the monitor how requests end, beside the data path: what is lost is told again, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.session import MemberSession

__all__ = ["OutcomeReporter", "OutcomeSource"]

# A failure is told at once, but not each of many.
_LEAST_GAP_S = 0.2
_JOIN_S = 3.0


class OutcomeSource(Protocol):
    """Where the totals come from."""

    def wait_for_failure(self, timeout_s: float) -> None:
        """Sleep until something failed since the last such wait, or the time is over."""

    def wake(self) -> None:
        """Make a `wait_for_failure` return."""

    def read(self) -> Sequence[pb.ServerOutcomes]:
        """The totals of this moment, one message a server."""


class OutcomeReporter:
    """Reports from a daemon thread until `close`: with each heartbeat what changed, failures at once.

    Args:
        session: Of the client.
        source: Its totals.
        settle: Counts answers that came too late, since a client that has become idle does not look for
            them by itself; says whether there are any that it still waits for.
    """

    def __init__(
        self, session: MemberSession, source: OutcomeSource, settle: Callable[[], bool]
    ) -> None:
        self._session = session
        self._source = source
        self._settle = settle
        self._closed = threading.Event()
        # As the monitor took them.
        self._told: dict[str, pb.ServerOutcomes] = {}
        self._thread = threading.Thread(target=self._run, name="outcomes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closed.set()
        self._source.wake()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        owed = False
        while not self._closed.is_set():
            # An answer that is merely late is to be told before the failure makes anybody suspect.
            self._source.wait_for_failure(0.0 if owed else self._session.heartbeat_s)
            owed = self._settle()
            totals = self._source.read()
            changed = [s for s in totals if self._told.get(s.server_id) != s]
            if changed and self._session.report_outcomes(changed):
                self._told = {s.server_id: s for s in totals}
            self._closed.wait(_LEAST_GAP_S)
