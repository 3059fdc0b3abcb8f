"""Execution models: the time of a batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.caps.cost import ImbalanceCost, ServerCost


@settings(deadline=None)
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


@settings(deadline=None)
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
