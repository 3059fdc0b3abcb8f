"""The event loop against an independent, slow one; execution models, and the figures of a run."""

import heapq
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_client.scheduler import RequestQueue, strategy
from simulator.caps import Rules, Run, Workload, simulate
from simulator.caps.cost import ImbalanceCost, ServerCost
from simulator.caps.metrics import figures, half_width_95

EXPERTS = 4


@dataclass(frozen=True)
class Steps:
    """Times that floating point holds exactly: sixteenths of a second by the load of expert 0."""

    def batch_s(self, load_E: np.ndarray) -> float:
        return (1 + float(load_E[0])) / 16

    def imbalance(self, load_E: np.ndarray) -> float:
        return 1.0


def slow(
    arrivals: list[Fraction], loads: list[int], trigger: int, tick: Fraction, batch: int
) -> tuple[list[Fraction], int]:
    """First come, first served with a heap of all events, those of a moment in the order end, arrival, tick.

    Ticks come for ever; one is counted where it makes a batch go.
    """
    end, arrival, ticking = 0, 1, 2
    heap: list[tuple[Fraction, int, int]] = [(at, arrival, n) for n, at in enumerate(arrivals)]
    heap.append((Fraction(0), ticking, 0))
    heapq.heapify(heap)
    queue: list[int] = []
    finish = [Fraction(0)] * len(arrivals)
    busy, left, events = False, len(arrivals), 0
    while left:
        now, kind, number = heapq.heappop(heap)
        if kind == end:
            busy = False
            left -= number
        elif kind == arrival:
            queue.append(number)
        else:
            heapq.heappush(heap, (now + tick, ticking, 0))
        # What else happens at this moment and is no tick comes first.
        if heap and heap[0][0] == now and heap[0][1] == arrival and kind == arrival and busy:
            continue
        if not busy and queue and (len(queue) >= trigger or kind == ticking):
            chosen, queue = queue[:batch], queue[batch:]
            finish_at = now + Fraction(1 + sum(loads[n] for n in chosen), 16)
            for n in chosen:
                finish[n] = finish_at
            heapq.heappush(heap, (finish_at, end, len(chosen)))
            busy = True
            events += kind == ticking
    return finish, events


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=1, max_size=40),
    st.integers(1, 6),
    st.sampled_from((1, 2, 5)),
    st.integers(1, 5),
)
def test_every_request_ends_when_it_must(requests, trigger, tick, batch) -> None:
    arrivals = np.cumsum([gap for gap, _ in requests]) / 16
    load_NE = np.zeros((len(requests), EXPERTS))
    load_NE[:, 0] = [load for _, load in requests]
    cost = Steps()
    queue = RequestQueue(strategy("fcfs"), batch_size=batch, window_size=batch)
    run = simulate(
        Workload(arrivals, load_NE, load_NE), queue, cost, Rules(trigger=trigger, tick_s=tick / 16)
    )
    wanted, ticks = slow(
        [Fraction(at).limit_denominator(16) for at in arrivals],
        [load for _, load in requests],
        trigger,
        Fraction(tick, 16),
        batch,
    )
    assert run.finish_s.tolist() == [float(at) for at in wanted]
    assert run.latency_s.tolist() == [float(f) - a for f, a in zip(wanted, arrivals, strict=True)]
    assert sorted(n for chosen in run.batches for n in chosen) == list(range(len(requests)))
    assert run.events == len(requests) + len(run.batches) + ticks


def test_the_queue_is_told_predictions_and_time_is_by_the_truth() -> None:
    """Request 1 is predicted heavy, and light in truth: `lpt` takes it, the batch is short."""
    truth_NE, predicted_NE = np.zeros((3, EXPERTS)), np.zeros((3, EXPERTS))
    truth_NE[2, 0] = predicted_NE[1, 0] = 9.0
    cost = Steps()
    queue = RequestQueue(strategy("lpt"), batch_size=2, window_size=3)
    run = simulate(
        Workload(np.zeros(3), truth_NE, predicted_NE), queue, cost, Rules(trigger=3, tick_s=1.0)
    )
    assert run.batches == [[0, 1], [2]]
    assert run.finish_s.tolist() == [1 / 16, 1 / 16, 1.0 + 10 / 16]


@given(st.integers(0, 2**32), st.integers(1, 24), st.integers(1, 5), st.integers(1, 100))
def test_a_step_takes_as_long_as_its_slowest_server(seed, experts, servers, steps) -> None:
    load_E = np.random.default_rng(seed).gamma(0.5, 30.0, experts)
    cost = ServerCost(servers, 1e-4, 3e-4, 1e-5, steps)
    slowest = 0.0
    for server in range(servers):
        pairs = [load / steps for load in load_E[server::servers]]
        active = sum(1 - np.exp(-each) for each in pairs)
        slowest = max(slowest, 3e-4 * active, 1e-5 * sum(pairs))
    assert cost.batch_s(load_E) == pytest.approx(steps * (1e-4 + slowest))


@given(st.integers(0, 2**32))
def test_imbalance_is_one_plus_cv(seed: int) -> None:
    load_E = np.random.default_rng(seed).gamma(0.5, 30.0, 12)
    wanted = 0.5 * (1 + 0.4 * load_E.std() / load_E.mean())
    assert ImbalanceCost(0.5, 0.4).batch_s(load_E) == pytest.approx(wanted)
    assert ImbalanceCost(0.5, 0.4).batch_s(np.zeros(12)) == 0.5


def test_imbalance_of_servers_is_par() -> None:
    cost = ServerCost(2, 0.0, 0.0, 1.0, 1)
    assert cost.imbalance(np.array([3.0, 1, 0, 0])) == 1.5
    assert cost.imbalance(np.zeros(4)) == 1.0


def test_figures() -> None:
    """A hundred requests, one a second, of which the first ten took 1000 s: a warm-up leaves them out."""
    latency_s = np.r_[np.full(10, 1000.0), np.arange(1.0, 91)]
    arrival_s = 5.0 + np.arange(100.0)
    loads = np.array([[1.0, 1.0], [2.0, 0.0]])
    run = Run(arrival_s + latency_s, latency_s, [[0]], loads, 0)
    cost = ImbalanceCost(1.0, 0.5)
    warm = figures(run, cost, 0.1)
    assert warm["p50"] == pytest.approx(45_500)
    assert warm["p90"] == pytest.approx(81_100)
    assert warm["p99"] == pytest.approx(89_110)
    assert warm["throughput"] == pytest.approx(100 / 1009)
    assert warm["imbalance"] == pytest.approx((1 + 1.5) / 2)
    assert figures(run, cost, 0.0)["p99"] == pytest.approx(1e6)


def test_confidence() -> None:
    """Against tables of Student's t: 4 values 3.182, 22 and more near 1.96."""
    assert half_width_95([1, 2, 3, 4]) == pytest.approx(3.182 * 1.29099 / 2, rel=1e-4)
    assert half_width_95([5, 5, 5]) == 0
    assert half_width_95([5]) is None
