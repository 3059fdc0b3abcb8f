"""Percentiles, throughput, confidence."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.caps import Run
from simulator.caps.cost import ImbalanceCost
from simulator.caps.metrics import figures, half_width_95


def test_figures() -> None:
    """A hundred requests, one a second, of which the first ten took 1000 s: a warm-up leaves them out."""
    latency_s = np.r_[np.full(10, 1000.0), np.arange(1.0, 91)]
    arrival_s = 5.0 + np.arange(100.0)
    loads = np.array([[1.0, 1.0], [2.0, 0.0]])
    run = Run(arrival_s + latency_s, latency_s, [[0]], loads, 0)
    cost = ImbalanceCost(1.0, 0.5)
    warm = figures(run, cost, 0.1)
    assert warm.p50 == pytest.approx(45_500)
    assert warm.p90 == pytest.approx(81_100)
    assert warm.p99 == pytest.approx(89_110)
    assert warm.throughput == pytest.approx(100 / 1009)
    assert warm.imbalance == pytest.approx((1 + 1.5) / 2)
    assert figures(run, cost, 0.0).p99 == pytest.approx(1e6)


def test_confidence() -> None:
    """Against tables of Student's t: 4 values 3.182, 22 and more near 1.96."""
    assert half_width_95([1, 2, 3, 4]) == pytest.approx(3.182 * 1.29099 / 2, rel=1e-4)
    assert half_width_95([5, 5, 5]) == 0
    assert half_width_95([5]) is None
