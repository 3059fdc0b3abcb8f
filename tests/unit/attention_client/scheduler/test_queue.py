"""The request queue, the first-come-first-served clock, and the bound of `cost_bounded`."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_client.scheduler import RequestQueue, SelectionStrategy, strategy, strategy_names
from attention_client.scheduler.clock import FcfsClock
from attention_client.scheduler.cost import ImbalanceCost
from attention_client.scheduler.strategies import Context
from attention_client.scheduler.strategies.base import FcfsView
from attention_client.scheduler.strategies.cost_bounded import CostBounded
from eaas.errors import ConfigError

EXPERTS = 12
COST = ImbalanceCost(0.04, 0.4)


def queue_of(chosen: SelectionStrategy, batch_size: int = 4, window_size: int = 12) -> RequestQueue:
    return RequestQueue(chosen, EXPERTS, batch_size=batch_size, window_size=window_size, cost=COST)


def clustered(rng: np.random.Generator, requests: int, run: int) -> np.ndarray:
    """Loads whose hot experts stay the same for `run` requests."""
    load_NE = np.ones((requests, EXPERTS))
    for first in range(0, requests, run):
        load_NE[first : first + run, rng.choice(EXPERTS, 2, replace=False)] = 60.0
    return load_NE


@pytest.mark.parametrize(
    ("batch_size", "window_size", "named"), [(8, 7, "window of 7"), (0, 4, "batch size 0")]
)
def test_wrong_sizes(batch_size: int, window_size: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        queue_of(strategy("fcfs"), batch_size, window_size)


@pytest.mark.parametrize("name", strategy_names())
@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(-3, 6), max_size=60), st.integers(0, 2**32))
def test_every_request_is_taken_once(name: str, steps: list[int], seed: int) -> None:
    """Steps: n > 0 requests arrive; 0 takes a full batch and -n at most n requests; some leave."""
    rng = np.random.default_rng(seed)
    queue = queue_of(strategy(name))
    waiting: list[int] = []
    for step in [*steps, *[0] * 60]:
        for _ in range(max(step, 0)):
            waiting.append(queue.add(rng.integers(0, 9, EXPERTS).astype(float)))
        if step > 3 and len(waiting) > 1:
            gone = waiting.pop(int(rng.integers(len(waiting))))
            queue.remove(gone)
        if step <= 0:
            room = -step or 4
            taken = queue.take(-step or None)
            assert len(taken) == min(room, len(waiting))
            assert not taken or waiting[0] in taken  # the oldest
            assert set(taken) <= set(waiting[:12])
            waiting = [ticket for ticket in waiting if ticket not in taken]
        assert len(queue) == len(waiting)
    assert not waiting
    with pytest.raises(KeyError):
        queue.remove(0)


class Wrong(SelectionStrategy):
    name = "wrong"

    def __init__(self, answer: list[int]) -> None:
        self.answer = answer

    def select(self, window_WE, batch_size, rng, context):  # type: ignore[no-untyped-def]
        return np.array(self.answer)


@pytest.mark.parametrize("answer", [[0, 1], [0, 1, 1], [1, 2, 3], [0, 1, 9], [0, 1, -1], []])
def test_a_strategy_that_breaks_its_contract_is_named(answer: list[int]) -> None:
    queue = queue_of(Wrong(answer), batch_size=3)
    for _ in range(6):
        queue.add(np.ones(EXPERTS))
    with pytest.raises(ConfigError, match="'wrong' chose"):
        queue.take()


def test_the_fcfs_schedule_by_hand() -> None:
    """Batches of two take 1 s each; the real schedule takes younger requests first."""
    clock = FcfsClock(ImbalanceCost(1.0, 0.0), EXPERTS, 2)
    for row in range(5):
        clock.arrive(row, np.ones(EXPERTS))
    view = clock.view(range(5))
    assert view.left_W.tolist() == view.wait_W.tolist() == [1, 1, 2, 2, np.inf]
    clock.dispatch([2, 3], 0.75, oldest=False)  # cheaper than there
    view = clock.view([0, 1, 4])
    assert view.usual_s == 0.75
    assert view.left_W.tolist() == [0.25, 0.25, np.inf]
    assert view.wait_W.tolist() == [1, 1, np.inf]
    # Company for the last one: theirs begins when the two before end.
    clock.arrive(5, np.ones(EXPERTS))
    view = clock.view([4, 5])
    assert view.left_W.tolist() == [2.25, 2.25]
    assert view.wait_W.tolist() == [3.0, 2.25]
    clock.dispatch([0, 1], 1.0, oldest=True)
    clock.forget([4, 5])  # empty queue: both schedules are equal again
    clock.arrive(7, np.ones(EXPERTS))
    clock.arrive(8, np.ones(EXPERTS))
    assert clock.view([7]).left_W.tolist() == [1.0]


def test_the_bias_of_chosen_batches_is_learned_and_forgotten() -> None:
    """Chosen batches take 20 % longer than predicted, batches of the oldest do not."""
    clock = FcfsClock(ImbalanceCost(1.0, 0.0), EXPERTS, 2)
    clock.observe(5.0, 0.0, oldest=True)  # nothing was predicted
    for number in range(200):
        clock.arrive(0, np.ones(EXPERTS))
        clock.dispatch([0], 1.0, oldest=number % 2 == 0)
        clock.observe(1.0 if number % 2 == 0 else 1.2, 1.0, oldest=number % 2 == 0)
    clock.arrive(0, np.ones(EXPERTS))
    assert 1.1 < clock.view([0]).bias < 1.2
    # A hundred batches of the oldest do not erase it.
    for calm in range(3000):
        if calm == 100:
            assert 1.1 < clock.view([0]).bias < 1.2
        clock.dispatch([0], 1.0, oldest=True)
        clock.observe(1.0, 1.0, oldest=True)
        clock.arrive(0, np.ones(EXPERTS))
    assert clock.view([0]).bias == pytest.approx(1, abs=0.02)


def test_a_queue_that_grows_beyond_chance() -> None:
    clock = FcfsClock(ImbalanceCost(1.0, 0.0), EXPERTS, 4)
    tickets, waiting = itertools.count(), []

    def growing(came: int, gone: int) -> bool:
        """Requests arrive, then batches of four go."""
        for _ in range(came):
            waiting.append(next(tickets))
            clock.arrive(waiting[-1], np.ones(EXPERTS))
        for _ in range(gone):
            clock.dispatch(waiting[:4], 1.0, oldest=True)
            del waiting[:4]
        return clock.view(waiting).growing

    assert not growing(8, 1)  # a batch waits: the queue is short
    # 29 came and 16 went: 13 more, of which 3 x sqrt(16) may be chance.
    assert growing(29, 4)
    assert not growing(0, 1)  # 9 more than 20: that may
    assert growing(100, 0)


def all_at_once(rng: np.random.Generator, requests: int) -> np.ndarray:
    """A backlog that only shrinks."""
    return np.zeros(requests)


def in_lumps(rng: np.random.Generator, requests: int) -> np.ndarray:
    """Bursts, at 0.5 to 3 times the capacity."""
    came_s = steadily(rng, requests)
    lump = int(rng.integers(1, 60))
    return came_s[np.arange(requests) // lump * lump]


def steadily(rng: np.random.Generator, requests: int) -> np.ndarray:
    rate = 4 / 0.06 * rng.uniform(0.5, 3)  # batches of 4 take 0.06 s, more or less
    return np.cumsum(rng.exponential(1 / rate, requests))


def fast_then_slow(rng: np.random.Generator, requests: int) -> np.ndarray:
    """The queue grows, then runs empty."""
    gaps_s = np.diff(steadily(rng, requests), prepend=0.0)
    gaps_s[: requests // 2] /= 4
    return np.cumsum(gaps_s)


def ends_of(name: str, load_NE: np.ndarray, came_s: np.ndarray) -> tuple[np.ndarray, float]:
    """When each request finishes, in full batches while more arrive; and the longest batch."""
    queue, now, came, longest_s = queue_of(strategy(name)), 0.0, 0, 0.0
    end_s = np.zeros(len(came_s))
    while True:
        while came < len(came_s) and (came_s[came] <= now or len(queue) < 4):
            now = max(now, came_s[came])
            queue.add(load_NE[came])
            came += 1
        taken = queue.take()
        if not taken:
            return end_s, longest_s
        batch_s = COST.batch_s(load_NE[taken].sum(axis=0))
        longest_s = max(longest_s, batch_s)
        now += batch_s
        end_s[taken] = now


@pytest.mark.parametrize("arrivals", [all_at_once, in_lumps, steadily, fast_then_slow])
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), run=st.integers(1, 20), requests=st.integers(20, 300))
def test_no_request_is_later_than_the_bound(
    arrivals: Callable[[np.random.Generator, int], np.ndarray], seed: int, run: int, requests: int
) -> None:
    """A request may lose 40 % of its time under fcfs (the bound while the queue grows) and two batches.
    After a burst, of which more may be late at once than a batch holds, it is rarely more.
    In a backlog it may lose 20 % of that time, or of half of the backlog's."""
    rng = np.random.default_rng(seed)
    load_NE, came_s = clustered(rng, requests, run), arrivals(rng, requests)
    fcfs_s, long_s = ends_of("fcfs", load_NE, came_s)
    end_s, longest_s = ends_of("cost_bounded", load_NE, came_s)
    late_s = end_s - fcfs_s - 0.4 * (fcfs_s - came_s)
    batches = 4 if arrivals is in_lumps else 2
    assert late_s.max() <= batches * max(long_s, longest_s)
    if arrivals is all_at_once:
        late_s = end_s - fcfs_s - 0.2 * np.maximum(fcfs_s, fcfs_s.max() / 2)
        assert late_s.max() <= 2 * max(long_s, longest_s)
        if requests >= 100 and run >= 4:
            assert end_s.max() < fcfs_s.max()  # choosing pays


@pytest.mark.parametrize("left_s", [0.01, 100.0])
def test_the_bound_by_hand(left_s: float) -> None:
    """Requests 1 to 3 resemble the oldest: they join it only if they cannot wait."""
    window_WE = np.ones((12, EXPERTS))
    window_WE[:4, 0] = 60.0
    for other in range(4, 12):
        window_WE[other, other] = 60.0
    left_W = np.full(12, 100.0)
    left_W[:2] = left_s
    view = FcfsView(left_W, np.full(12, 0.1), 0.04, 1.0)
    context = Context(COST, None, 12, view)
    chosen = CostBounded().select(window_WE, 4, np.random.default_rng(0), context).tolist()
    assert (1 in chosen) == (left_s < 1)
    assert not {2, 3} & set(chosen)
    # An unknown end is not late, even at a bound of zero.
    unknown_W = np.where(np.arange(12) < 6, left_W, np.inf)
    even_WE = np.ones((12, EXPERTS))
    even = FcfsView(unknown_W, unknown_W, 60.0, 1.0)
    nothing = CostBounded().select(
        even_WE, 4, np.random.default_rng(0), Context(COST, None, 12, even)
    )
    assert nothing.tolist() == [0, 1, 2, 3]
    # With less than a full window it is first come, first served.
    shallow = Context(COST, None, 13, view)
    chosen = CostBounded().select(window_WE, 4, np.random.default_rng(0), shallow).tolist()
    assert chosen == [0, 1, 2, 3]


class Saving(ImbalanceCost):
    """A fixed saving."""

    share = 0.0

    def saving(self, *_: object) -> float:
        return self.share


class Wasting(Saving):
    share = -0.5


class Share(Saving):
    share = 0.03


@pytest.mark.parametrize(
    ("cost", "growing", "taken"),
    [
        (COST, False, 2),
        (Saving(0.04, 0.4), False, 3),
        (Wasting(0.04, 0.4), False, 3),
        (Share(0.04, 0.4), False, 3),
        (Share(0.04, 0.4), True, 2),  # twice as much
    ],
)
def test_the_bound_grows_with_the_saving(cost: ImbalanceCost, growing: bool, taken: int) -> None:
    """Request 2 can wait for a batch only if the saving extends its bound."""
    window_WE = np.ones((12, EXPERTS))
    window_WE[:4, 0] = 60.0
    for other in range(4, 12):
        window_WE[other, other] = 60.0
    left_W, wait_W = np.full(12, 100.0), np.full(12, 1.0)
    left_W[1], wait_W[1] = -9.0, 0.01  # late anyway
    left_W[2] = 2 * 0.04 - 0.05
    view = FcfsView(left_W, wait_W, 0.04, 1.0, growing)
    chosen = CostBounded().select(
        window_WE, 4, np.random.default_rng(0), Context(cost, None, 12, view)
    )
    assert len({0, 1, 2} & set(chosen.tolist())) == taken
