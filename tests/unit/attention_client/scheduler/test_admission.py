"""Admission into a continuous batch: order, and no starvation."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_client.scheduler import RequestQueue, strategy, strategy_names
from attention_client.scheduler.admission import Admission

EXPERTS = 6


def admission(name: str, batch_size: int, window_size: int) -> tuple[Admission, RequestQueue]:
    queue = RequestQueue(strategy(name), batch_size=batch_size, window_size=window_size)
    return Admission(queue, batch_size), queue


def load_of(request: str) -> np.ndarray:
    load_E = np.ones(EXPERTS)
    load_E[int(request) % EXPERTS] = 9.0
    return load_E


def test_a_group_goes_in_as_places_become_free() -> None:
    desk, queue = admission("lpt", 3, 9)
    for number in range(9):
        load_E = np.full(EXPERTS, float(number))
        desk.arrive(str(number), load_E)
    going, choices = desk.candidates(1, lambda: None)
    # The oldest and the two longest, by age, one at a time.
    assert (going, [choice.tickets for choice in choices]) == (["0"], [[0, 8, 7]])
    assert choices[0].passed_over == 6
    desk.admit(going)
    assert desk.candidates(1, lambda: None) == (["7"], [])
    desk.admit(["7"])
    assert desk.candidates(2, lambda: None)[0] == ["8", "1"]  # the next group begins
    assert len(desk) == 7
    assert len(queue) == 3


def test_the_running_load_is_computed_only_for_a_choice() -> None:
    desk, _ = admission("norm_minimizing", 2, 4)
    for request in "0123":
        desk.arrive(request, load_of(request))
    asked = []

    def running() -> np.ndarray:
        asked.append(True)
        return 50 * load_of("1")

    assert desk.candidates(1, running)[0] == ["0"]
    # Without the running load, request 1 would go with 0; it resembles that load.
    desk.admit(["0"])
    assert desk.candidates(1, running)[0] == ["2"]
    assert len(asked) == 1


def test_a_request_that_never_fits_is_overtaken_a_bounded_number_of_times() -> None:
    """If the oldest does not fit into the cache, others go in, but only a bounded number."""
    desk, _ = admission("fcfs", 3, 6)
    for number in range(12):
        desk.arrive(str(number), load_of(str(number)))
    overtook = []
    while True:
        going, _ = desk.candidates(2, lambda: None)
        if going == ["0"]:
            break
        assert going[0] == "0"
        desk.admit(going[1:])
        overtook += going[1:]
    assert overtook == ["1", "2", "3"]
    desk.admit(["0"])
    assert desk.candidates(2, lambda: None)[0] == ["4", "5"]


def test_a_request_put_back_goes_first() -> None:
    desk, _ = admission("fcfs", 2, 4)
    for request in "0123":
        desk.arrive(request, load_of(request))
    desk.admit(desk.candidates(2, lambda: None)[0])
    desk.leave("1")
    desk.put_back("1")
    assert desk.candidates(2, lambda: None)[0] == ["1", "2"]


@settings(max_examples=60)
@given(
    st.sampled_from(strategy_names()),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 9)), max_size=40),
)
def test_every_request_is_admitted_once(
    name: str, batch_size: int, steps: list[tuple[int, int, int]]
) -> None:
    """Requests arrive, fit or do not fit, and leave; in the end all are admitted."""
    desk, _ = admission(name, batch_size, 2 * batch_size)
    came = 0
    waiting: set[str] = set()
    running: list[str] = []
    for comes, ends, fate in [*steps, *[(0, 4, 0)] * 200]:
        for _ in range(comes):
            desk.arrive(str(came), load_of(str(came)))
            waiting.add(str(came))
            came += 1
        for request in running[:ends]:
            desk.leave(request)
        running = running[ends:]
        if fate == 9 and waiting:
            gone = min(waiting)
            waiting.discard(gone)
            desk.leave(gone)
        if fate == 8 and running:
            desk.leave(running[-1])
            desk.put_back(running[-1])
            waiting.add(running.pop())
        room = batch_size - len(running)
        going, _ = desk.candidates(room, lambda: None)
        assert len(going) == len(set(going)) <= max(room, 0)
        assert set(going) <= waiting
        assert going or not waiting or not room
        fits = [request for place, request in enumerate(going) if fate % 3 == 0 or place % 2]
        desk.admit(fits)
        waiting -= set(fits)
        running += fits
        assert len(desk) == len(waiting)
    assert not waiting
