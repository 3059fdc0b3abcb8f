"""An attention client's reports of request outcomes to the monitor, off the data path."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from eaas.membership.session import MemberSession
from eaas.rpc.v1 import monitor_pb2 as pb

__all__ = ["OutcomeReporter", "OutcomeSource"]

# Minimum time between two reports.
_LEAST_GAP_S = 0.2
_JOIN_S = 3.0


class OutcomeSource(Protocol):
    """Source of a client's totals of request outcomes, per expert server."""

    def wait_for_failure(self, timeout_s: float) -> None:
        """Wait until a request fails (since the last such wait), or for the timeout; then a report is due."""

    def wake(self) -> None:
        """Make a running `wait_for_failure` return without a failure."""

    def read(self) -> Sequence[pb.ServerOutcomes]:
        """Return the current totals of request outcomes, one message per expert server."""


class OutcomeReporter:
    """Reports changed totals of request outcomes to the monitor, from a daemon thread.

    It reports at each heartbeat, and at once after a failure.

    Args:
        session: The client's session with the monitor.
        source: The client's totals.
        settle: Counts late answers, which an idle client does not read on its own; returns whether some are
            still missing.
    """

    def __init__(
        self, session: MemberSession, source: OutcomeSource, settle: Callable[[], bool]
    ) -> None:
        self._session = session
        self._source = source
        self._settle = settle
        self._closed = threading.Event()
        # Totals that the monitor has received.
        self._told: dict[str, pb.ServerOutcomes] = {}
        self._thread = threading.Thread(target=self._run, name="outcomes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread that sends the reports, when the client ends. Idempotent."""
        self._closed.set()
        self._source.wake()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        owed = False
        while not self._closed.is_set():
            # A late answer must be counted before its failure makes the server SUSPECT.
            self._source.wait_for_failure(0.0 if owed else self._session.heartbeat_s)
            owed = self._settle()
            totals = self._source.read()
            changed = [s for s in totals if self._told.get(s.server_id) != s]
            if changed and self._session.report_outcomes(changed):
                self._told = {s.server_id: s for s in totals}
            self._closed.wait(_LEAST_GAP_S)
