"""The event loop against an independent, slow one in whole numbers."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attention_client.scheduler import RequestQueue, strategy
from simulator.caps import Rules, Workload, simulate

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


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), min_size=1, max_size=40),
    st.integers(1, 6),
    st.sampled_from((1, 2, 5)),
    st.integers(1, 5),
)
def test_every_request_ends_when_it_must(
    requests: list[tuple[int, int]], trigger: int, tick: int, batch: int
) -> None:
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
