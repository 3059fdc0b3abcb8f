"""Budgets from service times, and the budget of hedges."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_client.connections.deadlines import HedgeBudget, ServiceTimes


def test_an_unmeasured_server_gets_time_to_warm_up() -> None:
    assert ServiceTimes().budget(1, 0.1, 10.0) == 2.0
    assert ServiceTimes().budget(1, 0.1, 0.5) == 0.5


def test_slower_answers_count_more_than_faster_ones() -> None:
    slower, faster = ServiceTimes(), ServiceTimes()
    for times, last in ((slower, 0.003), (faster, 0.001)):
        for _ in range(5):
            times.observe(1, 0.002)
        times.observe(1, last)
    up = slower.budget(1, 0.0, 100.0) - 0.012
    down = 0.012 - faster.budget(1, 0.0, 100.0)
    assert up > down > 0


def test_a_slow_first_answer_is_soon_forgotten() -> None:
    times = ServiceTimes()
    for seconds in (1.0, *[0.001] * 9):
        times.observe(1, seconds)
    assert times.budget(1, 0.0, 100.0) < 6 * 0.12


def test_a_long_call_gets_a_smaller_multiple() -> None:
    """A replica is asked within a quarter of a second if the usual time allows it."""
    times = ServiceTimes()
    times.observe(1, 0.001)
    assert times.budget(1, 0.0, 100.0) == pytest.approx(0.006)
    assert times.budget(64, 0.0, 100.0) == pytest.approx(0.2)
    times.observe(256, 0.5)
    assert times.budget(256, 0.0, 100.0) == pytest.approx(1.0)


@given(
    st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 10)), max_size=20),
    st.integers(1, 10_000),
    st.floats(0.001, 1.0),
    st.floats(1.0, 10.0),
)
def test_the_budget_stays_within_its_bounds(observed, rows, least_s, most_s) -> None:
    times = ServiceTimes()
    for size, seconds in observed:
        times.observe(size, seconds)
    assert least_s <= times.budget(rows, least_s, most_s) <= most_s


def test_threads_may_observe_and_read_concurrently() -> None:
    times = ServiceTimes()
    times.observe(1, 0.1)
    failures: list[RuntimeError] = []
    learning = threading.Event()

    def ask() -> None:
        try:
            while not learning.is_set():
                times.budget(1, 0.1, 1.0)
        except RuntimeError as error:
            failures.append(error)

    asker = threading.Thread(target=ask)
    asker.start()
    for i in range(20_000):
        times.observe(1 << (i % 60), 0.1)
    learning.set()
    asker.join()
    assert not failures


def test_the_tail_is_the_95th_percentile_once_known() -> None:
    times = ServiceTimes()
    for _ in range(19):
        assert times.hedge_s(1) is None
        times.observe(1, 0.010)
    for n in range(181):
        times.observe(1, 0.030 if n % 10 == 0 else 0.010)
    # A tenth takes three times as long: the tail is that time, relative to the average.
    tail = times.hedge_s(1)
    assert tail is not None
    assert 0.015 < tail < 0.06
    regular = ServiceTimes()
    for _ in range(200):
        regular.observe(8, 0.010)
    assert regular.hedge_s(8) == pytest.approx(0.015)


@given(st.floats(0.001, 1), st.lists(st.booleans(), max_size=500))
def test_hedges_never_exceed_their_share(share: float, events: list[bool]) -> None:
    budget, requests, hedges = HedgeBudget(share), 0, 0
    for hedge in events:
        if hedge:
            hedges += 2 * budget.spend(2)
        else:
            budget.earn()
            requests += 1
        assert hedges <= share * requests + 1e-9


def test_a_returned_hedge_can_be_spent_and_saved_ones_are_capped() -> None:
    budget = HedgeBudget(0.5)
    budget.earn()
    budget.earn()
    assert [budget.spend(1), budget.spend(1)] == [True, False]
    budget.give_back(1)
    assert budget.spend(1)
    for _ in range(100):
        budget.earn()
    assert [budget.spend(10), budget.spend(1)] == [True, False]
