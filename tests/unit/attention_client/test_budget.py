import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_client.budget import ServiceTimes


def test_a_server_never_heard_gets_time_to_warm_up() -> None:
    assert ServiceTimes().budget(1, 0.1, 10.0) == 2.0
    assert ServiceTimes().budget(1, 0.1, 0.5) == 0.5


def test_a_larger_call_gets_more_than_what_was_learned_of_a_small_one() -> None:
    times = ServiceTimes()
    times.observe(1, 0.1)
    assert times.budget(1, 0.0, 100.0) < times.budget(64, 0.0, 100.0)


def test_slower_counts_more_than_faster() -> None:
    slower, faster = ServiceTimes(), ServiceTimes()
    for times, last in ((slower, 0.003), (faster, 0.001)):
        times.observe(1, 0.002)
        times.observe(1, last)
    up = slower.budget(1, 0.0, 100.0) - 0.012
    down = 0.012 - faster.budget(1, 0.0, 100.0)
    assert up > down > 0


def test_patience_with_a_long_call_is_shorter() -> None:
    """So that a replica is asked within a quarter of a second wherever the usual time allows it."""
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


def test_threads_may_learn_and_ask_at_once() -> None:
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
