"""Arrivals and loads match their parameters."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.caps.fit import DOMAINS
from simulator.caps.workload import Workload, bursty, poisson


def of_domains(work: Workload) -> np.ndarray:
    """The domain of each request, told by its hot experts: requests of one share theirs."""
    hot_NE = work.load_NE >= 15
    _, domain_N = np.unique(hot_NE, axis=0, return_inverse=True)
    return domain_N


@pytest.mark.parametrize("make", [bursty, poisson])
def test_rate_and_loads(make) -> None:
    work = make(DOMAINS, 20_000, 200.0, 1)
    assert len(work.arrival_s) / work.arrival_s[-1] == pytest.approx(200, rel=0.03)
    assert (np.diff(work.arrival_s) >= 0).all()
    assert (work.load_NE.sum(axis=1) == 400).all()
    # 9 of 60 experts with weight 51: 9 in 10 pairs are on them.
    hottest_NE = np.sort(work.load_NE, axis=1)[:, -9:]
    assert hottest_NE.sum(axis=1).mean() == pytest.approx(360, rel=0.01)
    again = make(DOMAINS, 20_000, 200.0, 1)
    np.testing.assert_array_equal(again.load_NE, work.load_NE)
    assert not np.array_equal(make(DOMAINS, 20_000, 200.0, 2).arrival_s, work.arrival_s)


def test_bursts_are_of_one_domain_and_of_the_mean_length() -> None:
    domain_N, ended_N = DOMAINS.clusters(np.random.default_rng(3), 100_000)
    begins = np.flatnonzero(ended_N)
    lengths = np.diff([0, *begins])
    assert ended_N[begins].tolist() == lengths.tolist()
    assert lengths.mean() == pytest.approx(DOMAINS.burst_mean, rel=0.03)
    # Geometric: the standard deviation is about the mean.
    assert lengths.std() == pytest.approx(DOMAINS.burst_mean, rel=0.1)
    assert set((np.flatnonzero(np.diff(domain_N)) + 1).tolist()) <= set(begins.tolist())
    assert np.bincount(domain_N).min() > 0.5 * len(domain_N) / DOMAINS.domains


def test_in_a_burst_requests_come_faster() -> None:
    work = bursty(DOMAINS, 20_000, 100.0, 5)
    same_N = of_domains(work)[1:] == of_domains(work)[:-1]
    gap_s = np.diff(work.arrival_s)
    assert 1 / gap_s[same_N].mean() == pytest.approx(130, rel=0.05)
