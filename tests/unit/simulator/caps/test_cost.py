"""Execution models, and the figures of a run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.caps import Run
from simulator.caps.cost import ImbalanceCost, ServerCost
from simulator.caps.metrics import figures, half_width_95


@given(st.integers(0, 2**32), st.integers(1, 24), st.integers(1, 5), st.integers(1, 100))
def test_a_step_takes_as_long_as_its_slowest_server(
    seed: int, experts: int, servers: int, steps: int
) -> None:
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
