"""Measured speeds of servers, and ejections."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_client.layer_call.server_speeds import Ejections, Speeds

SERVERS = ("a", "b", "c", "d", "e", "f")


def learn(speeds: Speeds, server: str, rate: float, answers: int = 3, queue_s: float = 0.0) -> None:
    for _ in range(answers):
        speeds.observe(server, 2.0, 2.0 * rate + queue_s, 0.0, queue_s=queue_s)


A, WITH_QUEUE = ("a", 0.001), [("a", 0.001, 400), ("b", 0.001, 400, 0.3)]


@pytest.mark.parametrize(
    ("answers", "in_flight", "now", "rates", "backlogs"),
    [
        # An unmeasured server has the usual speed.
        ([], [0, 0], 0.0, [1.0, 1.0], [0, 0]),
        ([("a", 0.002)], [0, 0], 0.0, [0.002, 0.002], [0, 0]),
        # Slow first answers do not make a slow server; a slow-down is learned within a few.
        ([A, ("b", 1.0, 2)], [0, 0], 0.0, [0.001, 0.001], [0, 0]),
        ([A, ("b", 1.0, 2), ("b", 0.001), A], [0, 0], 0.0, [0.001, 0.001], [0, 0]),
        ([A, ("b", 0.001, 100), ("b", 0.010, 5)], [0, 0], 0.0, [0.001, 0.010], [0, 0]),
        # The backlog uses the server's own speed.
        ([A, ("b", 0.003)], [10, 10], 0.0, [0.001, 0.003], [0.01, 0.03]),
        # Time for other requests is a queue, in which a client's own requests wait, too.
        (WITH_QUEUE, [0, 0], 0.0, [0.001, 0.001], [0, 0.3]),
        (WITH_QUEUE, [50, 500], 0.0, [0.001, 0.001], [0.05, 0.5]),
        ([("a", 0.001, 5, 14.0)], [0], 0.0, [0.001], [10.0]),
        # One wait says little, and an old queue fades.
        ([("a", 0.001, 50), ("a", 0.001, 1, 1.0)], [0], 0.0, [0.001], [0.02]),
        ([("a", 0.001, 50), ("a", 0.001, 1, 1.0)], [0], 10.0, [0.001], [0.01]),
        # An old measurement fades.
        ([A, ("b", 0.001), ("c", 0.101)], [0, 0, 0], 0.0, [0.001, 0.001, 0.101], [0, 0, 0]),
        ([A, ("b", 0.001), ("c", 0.101)], [0, 0, 0], 10.0, [0.001, 0.001, 0.051], [0, 0, 0]),
        ([A, ("b", 0.001), ("c", 0.101)], [0, 0, 0], 60.0, [0.001, 0.001, 0.0026], [0, 0, 0]),
    ],
)
def test_speeds_and_queues(
    answers: list[Any],
    in_flight: list[float],
    now: float,
    rates: list[float],
    backlogs: list[float],
) -> None:
    speeds, servers = Speeds(), SERVERS[: len(rates)]
    for each in answers:
        learn(speeds, *each)
    load = speeds.load(servers, in_flight, now)
    assert load.rate_S == pytest.approx(rates, rel=0.02)
    assert load.backlog_S == pytest.approx(backlogs)
    if answers is WITH_QUEUE:
        assert not speeds.is_outlier("b", servers)


@given(st.floats(0, 1e13, allow_subnormal=False), st.floats(0, 1e13, allow_subnormal=False))
def test_no_stated_time_is_believed_without_bounds(service_s: float, queue_s: float) -> None:
    speeds = Speeds()
    for _ in range(10):
        speeds.observe("a", 1.0, service_s, 0.0, pairs=3.0, queue_s=queue_s)
    load = speeds.load(("a",), [0], 0.0)
    assert load.rate_S[0] > 0
    assert 0 <= load.backlog_S[0] <= 10.0
    assert load.load_pairs > 0


def outliers(speeds: Speeds) -> list[str]:
    servers = ("a", "b", "c")
    return [s for s in servers if speeds.is_outlier(s, servers)]


def test_an_outlier_needs_enough_answers() -> None:
    speeds = Speeds()
    for answers in range(1, 6):
        for server, seconds in (("a", 0.001), ("b", 0.001), ("c", 0.006)):
            speeds.observe(server, 1.0, seconds, 0.0)
        assert outliers(speeds) == (["c"] if answers == 5 else [])
    # On trial after its ejection: the first answer may be long, the second decides.
    for again in ([0.006, 0.006], [0.006, 0.001]):
        speeds.forget("c")
        assert outliers(speeds) == []
        speeds.observe("c", 1.0, again[0], 0.0)
        assert outliers(speeds) == []
        speeds.observe("c", 1.0, again[1], 0.0)
        assert outliers(speeds) == (["c"] if again[1] > 0.005 else [])


def test_microseconds_make_no_outlier() -> None:
    speeds = Speeds()
    for server, rate in (("a", 1e-6), ("b", 1e-6), ("c", 1e-4)):
        learn(speeds, server, rate, answers=10)
    assert outliers(speeds) == []


def test_a_server_with_little_work_is_no_outlier() -> None:
    """Each answer has a fixed cost."""
    speeds = Speeds()
    for _ in range(10):
        for server, work in (("a", 8.0), ("b", 8.0), ("c", 1.0)):
            speeds.observe(server, work, 0.020, 0.0)
    assert outliers(speeds) == []


def fail(ejections: Ejections, server: str, now: float, servers: tuple[str, ...] = SERVERS) -> bool:
    return [ejections.failed(server, servers, now) for _ in range(Ejections.FAILURES)][-1]


def test_only_consecutive_failures_eject() -> None:
    ejections = Ejections()
    for _ in range(10):
        assert not ejections.failed("a", SERVERS, 0.0)
        assert not ejections.failed("a", SERVERS, 0.0)
        ejections.answered("a")
    assert not ejections.out("a", 0.0)
    assert fail(ejections, "a", 0.0)
    assert ejections.out("a", 4.9)
    assert not ejections.out("a", 5.0)


def test_each_ejection_is_longer_until_a_minute_passes() -> None:
    ejections, now, lengths = Ejections(), 0.0, []
    for _ in range(6):
        assert fail(ejections, "a", now)
        length = next(s for s in range(100) if not ejections.out("a", now + s))
        lengths.append(length)
        now += length + 1
    assert lengths == [5, 10, 20, 40, 60, 60]
    assert fail(ejections, "a", now + 100)
    assert not ejections.out("a", now + 105)


@pytest.mark.parametrize(("servers", "most"), [(1, 0), (2, 1), (3, 1), (5, 1), (6, 2)])
def test_the_cap_on_ejections(servers: int, most: int) -> None:
    ejections, names = Ejections(), SERVERS[:servers]
    assert sum(fail(ejections, name, 0.0, names) for name in names) == most


@given(st.lists(st.tuples(st.sampled_from(SERVERS), st.booleans(), st.floats(0, 30))))
def test_at_most_a_third_are_ejected(events) -> None:
    ejections, now = Ejections(), 0.0
    for server, failed, pause in events:
        now += pause
        if failed:
            ejections.failed(server, SERVERS, now)
        else:
            ejections.slow(server, SERVERS, now)
        assert sum(ejections.out(name, now) for name in SERVERS) <= 2
