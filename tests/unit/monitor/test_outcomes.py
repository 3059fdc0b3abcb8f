"""When what clients say makes a server suspect: by example, and for any stream of reports."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.outcomes import OutcomeBook, Said

LEASE_S = 2.0
TICK_S = LEASE_S / 8
STEP_S = 0.5
NO_ANSWERS = "1 of 1 client gets no answers"


class Client:
    """A client that keeps its totals about one server, as the tally does."""

    def __init__(self, book: OutcomeBook, name: str, server: str = "s") -> None:
        self.book, self.name, self.server = book, name, server
        self.outcomes = self.answered = self.failing = 0

    def answer(self) -> Said:
        self.outcomes, self.answered, self.failing = self.outcomes + 1, self.answered + 1, 0
        return Said(self.outcomes, self.answered, self.failing)

    def fail(self) -> Said:
        self.outcomes, self.failing = self.outcomes + 1, self.failing + 1
        return Said(self.outcomes, self.answered, self.failing)

    def say(self, said: Said, now: float) -> None:
        self.book.take(self.server, self.name, said, now)


@pytest.fixture
def book() -> OutcomeBook:
    return OutcomeBook(LEASE_S)


def ticks(book: OutcomeBook, start: float, end: float, server: str = "s") -> list[str | None]:
    """What the book says at each tick."""
    times = range(int((end - start) / TICK_S) + 1)
    return [book.accusation(server, start + i * TICK_S) for i in times]


# -- by example ------------------------------------------------------------------------------------


def test_a_server_that_answers_nobody_is_accused_by_all(book: OutcomeBook) -> None:
    clients = [Client(book, name) for name in "abc"]
    for client in clients:
        client.say(client.answer(), 0.0)
    for at, client in enumerate(clients):
        client.say(client.fail(), 1.0 + at / 10)
    # The last answer may have come just before the failure.
    assert set(ticks(book, 1.25, 1.19 + book.patience_s)) == {None}
    assert book.accusation("s", 1.2 + book.patience_s) == "3 of 3 clients get no answers"


def test_one_answer_clears_it(book: OutcomeBook) -> None:
    client = Client(book, "a")
    client.say(client.fail(), 0.0)
    assert book.accusation("s", 2.0) == NO_ANSWERS
    client.say(client.answer(), 3.0)
    assert book.accusation("s", 3.0) is None


def test_it_lapses_where_nobody_complains_any_more(book: OutcomeBook) -> None:
    client = Client(book, "a")
    client.say(client.fail(), 0.0)
    assert set(ticks(book, book.patience_s, book.memory_s - TICK_S)) == {NO_ANSWERS}
    assert book.accusation("s", book.memory_s) is None


def test_a_failure_among_answers_is_none(book: OutcomeBook) -> None:
    """Failures are told at once, the answers after them up to a heartbeat later."""
    client = Client(book, "a")
    for beat in range(100):
        now = beat * 0.9
        client.answer()
        client.say(client.fail(), now)
        assert set(ticks(book, now, now + 0.8)) == {None}


def test_row_6_one_client_that_is_cut_off_accuses_nobody(book: OutcomeBook) -> None:
    """Row 6: client and one server cut from each other, both reach the monitor: that client reroutes;
    the server stays healthy for the others.
    """
    cut_off, other = Client(book, "cut-off"), Client(book, "other")
    for i in range(200):
        now = i * STEP_S
        cut_off.say(cut_off.fail(), now)
        # Idle for a while, too, but not for long.
        if i % int(book.window_s / STEP_S) == 0:
            other.say(other.answer(), now)
        assert book.accusation("s", now) is None


def test_a_client_that_has_stopped_asking_vouches_for_nobody(book: OutcomeBook) -> None:
    idle, client = Client(book, "idle"), Client(book, "a")
    idle.say(idle.answer(), 0.0)
    client.say(client.fail(), 0.0)
    assert set(ticks(book, 0.0, book.window_s - TICK_S)) == {None}
    assert book.accusation("s", book.window_s) == NO_ANSWERS


def test_the_same_totals_of_another_life_are_new(book: OutcomeBook) -> None:
    client = Client(book, "a")
    client.say(client.fail(), 0.0)
    assert book.accusation("s", 2.0) == NO_ANSWERS
    book.forget("s")
    assert book.accusation("s", 2.0) is None
    client.say(Said(1, 0, 1), 2.0)
    assert ticks(book, 2.0, 2.0 + book.patience_s)[-1] == NO_ANSWERS


# -- for any stream of reports ------------------------------------------------------------------------

# Who reports what, and how much later than the one before.
EVENTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.booleans(), st.sampled_from([0.0, 0.2, 0.9, 3.0, 30.0])),
    max_size=30,
)


def stream(events: Iterable[tuple[str, bool, float]]) -> list[tuple[str, Said, float]]:
    """The reports (client, totals, time) that such events make."""
    book = OutcomeBook(LEASE_S)
    clients = {name: Client(book, name) for name in "abc"}
    now, reports = 0.0, []
    for name, answered, later_s in events:
        now += later_s
        client = clients[name]
        reports.append((name, client.answer() if answered else client.fail(), now))
    return reports


def verdicts(reports: Iterable[tuple[str, Said, float]]) -> list[tuple[float, str | None]]:
    """What a book says at each tick, and after each report."""
    book = OutcomeBook(LEASE_S)
    found: list[tuple[float, str | None]] = []
    tick_at = 0.0
    for name, said, now in reports:
        while tick_at <= now:
            found.append((tick_at, book.accusation("s", tick_at)))
            tick_at += TICK_S
        book.take("s", name, said, now)
        found.append((now, book.accusation("s", now)))
    end = tick_at + 2 * book.memory_s
    while tick_at <= end:
        found.append((tick_at, book.accusation("s", tick_at)))
        tick_at += TICK_S
    return found


@given(EVENTS, st.randoms(use_true_random=False))
def test_reports_that_are_repeated_or_overtaken_change_nothing(events, random) -> None:
    reports = stream(events)
    noisy: list[tuple[str, Said, float]] = []
    for i, (name, said, now) in enumerate(reports):
        noisy.append((name, said, now))
        # Any that were sent before come once more, in any order.
        former = random.choices(reports[: i + 1], k=random.randrange(4))
        noisy += [(n, s, now) for n, s, _ in former]
    once = dict(verdicts(reports))
    assert dict(verdicts(noisy)) == once


@given(EVENTS)
def test_it_does_not_flap(events) -> None:
    memory_s = OutcomeBook(LEASE_S).memory_s
    found = verdicts(stream(events))
    assert found[-1][1] is None, "it lapses in the end"
    cleared_at = None
    for (_, before), (now, after) in itertools.pairwise(found):
        if before is not None and after is None:
            cleared_at = now
        if before is None and after is not None and cleared_at is not None:
            assert now - cleared_at >= memory_s


@given(EVENTS)
def test_nobody_is_accused_whom_somebody_just_praised(events) -> None:
    """Row 6, for any stream: while one client gets answers the server is not suspected."""
    book = OutcomeBook(LEASE_S)
    last: dict[str, tuple[bool, float]] = {}
    for name, said, now in stream(events):
        book.take("s", name, said, now)
        last[name] = (said.failures_since_answer == 0, now)
        praised = any(good and now - at < book.window_s for good, at in last.values())
        if praised:
            assert book.accusation("s", now) is None


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=300))
def test_what_is_kept_is_bounded_by_who_lives(pairs) -> None:
    """Clients come and go; at most 3 live at a time."""
    book = OutcomeBook(LEASE_S)
    living: list[str] = []
    for at, (client, server) in enumerate(pairs):
        name = f"client-{client}"
        if name not in living:
            living.append(name)
        if len(living) > 3:
            book.forget(living.pop(0))
        book.take(f"server-{server}", name, Said(at + 1, 0, 1), float(at))
        assert len(book) <= 3 * 6
    for name in living:
        book.forget(name)
    assert len(book) == 0
