"""Clients and one server in simulated time: the figures of ADR 0008 (`-s` prints them)."""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections.abc import Callable

import pytest

from expert_server.loop.batching import Wait, create_batcher

LAYERS, STEPS, STEP_END_S = 16, 60, 2e-3


def simulate(
    mode: str,
    window_s: float,
    clients: int,
    pause_s: float,
    batch_s: Callable[[int], float],
    seed: int,
) -> tuple[float, float]:
    """Mean latency of a call in seconds, calls per second.

    Each client calls layer after layer, with a pause in between (10 % more or less), and a longer one at
    the end of each step.
    """
    rng = random.Random(seed)
    batcher = create_batcher(mode, window_s, LAYERS)  # type: ignore[arg-type]
    order = itertools.count()
    writes = [(rng.random() * pause_s / 2, next(order), client) for client in range(clients)]
    heapq.heapify(writes)
    calls, sent = [0] * clients, [0.0] * clients
    latencies: list[float] = []
    now = 0.0
    while True:
        while writes and writes[0][0] <= now:
            sent_at, _, client = heapq.heappop(writes)
            sent[client] = sent_at
            batcher.admit(client, client, calls[client] % LAYERS, now)
        decision = batcher.decide(now)
        if decision is None:
            if not writes:
                return statistics.mean(latencies), len(latencies) / now
            now = writes[0][0]
            continue
        if isinstance(decision, Wait):
            coming = [at for at, _, client in writes if client == decision.connection]
            now = min([decision.until + 1e-6, *(max(at, now) for at in coming)])
            continue
        batch = batcher.take(decision.layer)
        now += batch_s(len(batch))
        batcher.computed(len(batch), batch_s(len(batch)))
        for client in batch:
            batcher.answered(client, now)
            latencies.append(now - sent[client])
            calls[client] += 1
            pause = pause_s * rng.uniform(0.9, 1.1)
            if calls[client] % LAYERS == 0:
                pause += STEP_END_S * rng.uniform(0.9, 1.1)
            if calls[client] < STEPS * LAYERS:
                heapq.heappush(writes, (now + pause, next(order), client))
        batcher.keep({client for client in range(clients) if calls[client] < STEPS * LAYERS})


def weights_once(requests: int) -> float:
    return 300e-6 + 20e-6 * requests


def sum_of_parts(requests: int) -> float:
    return 300e-6 * requests


@pytest.mark.parametrize(
    ("batch_s", "clients", "pause_us", "latency", "throughput"),
    [
        (weights_once, 1, 50, 1.0, 1.0),
        (weights_once, 2, 50, 0.8, 1.2),
        (weights_once, 4, 50, 0.6, 1.5),
        (weights_once, 8, 150, 1.0, 1.0),
        (weights_once, 4, 1000, 1.05, 0.97),
        (sum_of_parts, 2, 50, 1.05, 0.97),
        (sum_of_parts, 4, 150, 1.05, 0.97),
    ],
)
def test_window_pays_if_weights_are_read_once_and_costs_little_otherwise(
    batch_s: Callable[[int], float],
    clients: int,
    pause_us: int,
    latency: float,
    throughput: float,
) -> None:
    """Relative to `immediate`: latency at most, throughput at least."""

    def mean(mode: str, window_s: float) -> tuple[float, float]:
        runs = [simulate(mode, window_s, clients, pause_us * 1e-6, batch_s, s) for s in range(3)]
        return statistics.mean(r[0] for r in runs), statistics.mean(r[1] for r in runs)

    base, window, all_active = mean("immediate", 0), mean("window", 1e-3), mean("all", 5e-3)
    for name, found in (("window", window), ("all", all_active)):
        print(f"{name}: latency {found[0] / base[0]:.2f}, throughput {found[1] / base[1]:.2f}")
    assert window[0] <= latency * base[0] * (1 + 1e-9)
    assert window[1] >= throughput * base[1] * (1 - 1e-9)
