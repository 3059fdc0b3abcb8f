"""Times of outcome reports, and retries."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

import pytest

from eaas.membership.failure_reports import OutcomeReporter
from eaas.rpc.v1 import monitor_pb2 as pb

PATIENCE_S = 30.0


class Session:
    """Accepts or refuses reports."""

    heartbeat_s = 0.01

    def __init__(self) -> None:
        self.taken: queue.Queue[list[tuple[str, int]]] = queue.Queue()
        self.takes = True

    def report_outcomes(self, outcomes: Sequence[pb.ServerOutcomes]) -> bool:
        self.taken.put([(o.server_id, o.answered) for o in outcomes])
        return self.takes


class Source:
    """Totals set by the test."""

    def __init__(self) -> None:
        self.answered: dict[str, int] = {}
        self.owed = 0
        self.woken = threading.Event()

    def wait_for_failure(self, timeout_s: float) -> None:
        self.woken.wait(timeout_s)
        self.woken.clear()

    def settle(self) -> bool:
        """Count one late answer per call."""
        self.owed -= self.owed > 0
        self.answered.update({"late": 1} if not self.owed else {})
        return self.owed > 0

    def wake(self) -> None:
        self.woken.set()

    def read(self) -> list[pb.ServerOutcomes]:
        return [pb.ServerOutcomes(server_id=s, answered=n) for s, n in self.answered.items()]


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def reporter(session: Session, source: Source) -> Iterator[OutcomeReporter]:
    reporter = OutcomeReporter(session, source, lambda: False)  # type: ignore[arg-type]
    yield reporter
    reporter.close()
    assert not reporter._thread.is_alive()


def test_changes_are_reported_once(
    session: Session, source: Source, reporter: OutcomeReporter
) -> None:
    source.answered = {"a": 1, "b": 1}
    assert session.taken.get(timeout=PATIENCE_S) == [("a", 1), ("b", 1)]
    source.answered = {"a": 1, "b": 2}
    assert session.taken.get(timeout=PATIENCE_S) == [("b", 2)]
    with pytest.raises(queue.Empty):
        session.taken.get(timeout=0.5)


def test_refused_reports_are_repeated(
    session: Session, source: Source, reporter: OutcomeReporter
) -> None:
    session.takes = False
    source.answered = {"a": 1}
    for _ in range(2):
        assert session.taken.get(timeout=PATIENCE_S) == [("a", 1)]
    session.takes = True
    assert session.taken.get(timeout=PATIENCE_S) == [("a", 1)]


def test_a_failure_is_reported_at_once_when_no_late_answer_is_missing(
    source: Source, session: Session
) -> None:
    session.heartbeat_s = 2 * PATIENCE_S
    source.owed = 3
    reporter = OutcomeReporter(session, source, source.settle)  # type: ignore[arg-type]
    source.wake()
    assert session.taken.get(timeout=PATIENCE_S) == [("late", 1)]
    reporter.close()
    assert not reporter._thread.is_alive()
