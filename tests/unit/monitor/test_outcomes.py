"""When clients' reports make a server suspect: by example, and for any stream of reports."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.failure_detection.failure_reports import FailureReports, RequestTotals

LEASE_S = 2.0
TICK_S = LEASE_S / 8
STEP_S = 0.5
NO_ANSWERS = "1 of 1 client gets no answers"


class Client:
    """A client that keeps totals about one server, as the live one does."""

    def __init__(self, book: FailureReports, name: str, server: str = "s") -> None:
        self.book, self.name, self.server = book, name, server
        self.outcomes = self.answered = self.failing = 0

    def answer(self) -> RequestTotals:
        self.outcomes, self.answered, self.failing = self.outcomes + 1, self.answered + 1, 0
        return RequestTotals(self.outcomes, self.answered, self.failing)

    def fail(self) -> RequestTotals:
        self.outcomes, self.failing = self.outcomes + 1, self.failing + 1
        return RequestTotals(self.outcomes, self.answered, self.failing)

    def say(self, said: RequestTotals, now: float) -> None:
        self.book.record(self.server, self.name, said, now)


@pytest.fixture
def book() -> FailureReports:
    return FailureReports(LEASE_S)


def ticks(book: FailureReports, start: float, end: float, server: str = "s") -> list[str | None]:
    """The accusation at each tick."""
    times = range(int((end - start) / TICK_S) + 1)
    return [book.accusation(server, start + i * TICK_S) for i in times]


# -- by example ------------------------------------------------------------------------------------


def test_a_server_without_answers_is_accused(book: FailureReports) -> None:
    clients = [Client(book, name) for name in "abc"]
    for client in clients:
        client.say(client.answer(), 0.0)
    for at, client in enumerate(clients):
        client.say(client.fail(), 1.0 + at / 10)
    # The last answer may have come just before the failure.
    assert set(ticks(book, 1.25, 1.19 + book.patience_s)) == {None}
    assert book.accusation("s", 1.2 + book.patience_s) == "3 of 3 clients get no answers"


def test_a_failure_among_answers_does_not_count(book: FailureReports) -> None:
    """Failures are reported at once, later answers up to a heartbeat later."""
    client = Client(book, "a")
    for beat in range(100):
        now = beat * 0.9
        client.answer()
        client.say(client.fail(), now)
        assert set(ticks(book, now, now + 0.8)) == {None}


def test_row_6_one_client_that_is_cut_off_accuses_nobody(book: FailureReports) -> None:
    """Row 6: client and one server cut from each other, both reach the monitor: that client reroutes;
    the server stays healthy for the others.
    """
    cut_off, other = Client(book, "cut-off"), Client(book, "other")
    for i in range(200):
        now = i * STEP_S
        cut_off.say(cut_off.fail(), now)
        # Also idle for a while, but not for long.
        if i % int(book.window_s / STEP_S) == 0:
            other.say(other.answer(), now)
            last = now
        assert book.accusation("s", now) is None
    # An old good report does not count.
    assert set(ticks(book, now, last + book.window_s - TICK_S)) == {None}
    assert book.accusation("s", last + book.window_s) == NO_ANSWERS


def test_totals_of_another_incarnation_are_new(book: FailureReports) -> None:
    client = Client(book, "a")
    client.say(client.fail(), 0.0)
    assert book.accusation("s", 2.0) == NO_ANSWERS
    book.forget("s")
    assert book.accusation("s", 2.0) is None
    client.say(RequestTotals(1, 0, 1), 2.0)
    assert ticks(book, 2.0, 2.0 + book.patience_s)[-1] == NO_ANSWERS


# -- for any stream of reports ------------------------------------------------------------------------

# The reporting client, its report, and the delay after the previous one.
EVENTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.booleans(), st.sampled_from([0.0, 0.2, 0.9, 3.0, 30.0])),
    max_size=30,
)


def stream(events: Iterable[tuple[str, bool, float]]) -> list[tuple[str, RequestTotals, float]]:
    """The reports (client, totals, time) of these events."""
    book = FailureReports(LEASE_S)
    clients = {name: Client(book, name) for name in "abc"}
    now, reports = 0.0, []
    for name, answered, later_s in events:
        now += later_s
        client = clients[name]
        reports.append((name, client.answer() if answered else client.fail(), now))
    return reports


def verdicts(reports: Iterable[tuple[str, RequestTotals, float]]) -> list[tuple[float, str | None]]:
    """The accusation at each tick, and after each report."""
    book = FailureReports(LEASE_S)
    found: list[tuple[float, str | None]] = []
    tick_at = 0.0
    for name, said, now in reports:
        while tick_at <= now:
            found.append((tick_at, book.accusation("s", tick_at)))
            tick_at += TICK_S
        book.record("s", name, said, now)
        found.append((now, book.accusation("s", now)))
    end = tick_at + 2 * book.memory_s
    while tick_at <= end:
        found.append((tick_at, book.accusation("s", tick_at)))
        tick_at += TICK_S
    return found


@given(EVENTS, st.randoms(use_true_random=False))
def test_reports_that_are_repeated_or_overtaken_change_nothing(events, random) -> None:
    reports = stream(events)
    noisy: list[tuple[str, RequestTotals, float]] = []
    for i, (name, said, now) in enumerate(reports):
        noisy.append((name, said, now))
        # Earlier reports arrive again, in any order.
        former = random.choices(reports[: i + 1], k=random.randrange(4))
        noisy += [(n, s, now) for n, s, _ in former]
    once = dict(verdicts(reports))
    assert dict(verdicts(noisy)) == once


@given(EVENTS)
def test_accusations_do_not_flap(events) -> None:
    memory_s = FailureReports(LEASE_S).memory_s
    found = verdicts(stream(events))
    assert found[-1][1] is None, "it lapses in the end"
    cleared_at = None
    for (_, before), (now, after) in itertools.pairwise(found):
        if before is not None and after is None:
            cleared_at = now
        if before is None and after is not None and cleared_at is not None:
            assert now - cleared_at >= memory_s


@given(EVENTS)
def test_a_recent_good_report_prevents_an_accusation(events) -> None:
    """Row 6, for any stream: while one client gets answers the server is not suspected."""
    book = FailureReports(LEASE_S)
    last: dict[str, tuple[bool, float]] = {}
    for name, said, now in stream(events):
        book.record("s", name, said, now)
        last[name] = (said.failures_since_answer == 0, now)
        praised = any(good and now - at < book.window_s for good, at in last.values())
        if praised:
            assert book.accusation("s", now) is None


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=300))
def test_the_number_of_reports_is_bounded_by_live_members(pairs) -> None:
    """Clients come and go; at most 3 are live at a time."""
    book = FailureReports(LEASE_S)
    living: list[str] = []
    for at, (client, server) in enumerate(pairs):
        name = f"client-{client}"
        if name not in living:
            living.append(name)
        if len(living) > 3:
            book.forget(living.pop(0))
        book.record(f"server-{server}", name, RequestTotals(at + 1, 0, 1), float(at))
        assert len(book) <= 3 * 6
    for name in living:
        book.forget(name)
    assert len(book) == 0
