"""Arrivals and loads match their parameters."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.caps.fit import DOMAINS
from simulator.caps.workload import Workload, bursty, from_times, poisson


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
    assert work.predicted_NE is work.load_NE
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


def test_a_prediction_is_another_sample_of_the_same_domain() -> None:
    work = poisson(DOMAINS, 4000, 100.0, 1, predicted_pairs=40)
    assert work.predicted_NE.sum(axis=1) == pytest.approx(400)
    correlation = [
        np.corrcoef(a, b)[0, 1] for a, b in zip(work.load_NE, work.predicted_NE, strict=True)
    ]
    strangers = np.corrcoef(work.load_NE[0], work.predicted_NE[1])[0, 1]
    assert 0.75 < np.mean(correlation) < 0.95
    assert strangers < 0.75
    # What is loaded does not depend on what is predicted.
    np.testing.assert_array_equal(poisson(DOMAINS, 4000, 100.0, 1).load_NE, work.load_NE)


@pytest.mark.parametrize(("clustered", "least"), [(True, 0.9), (False, 0.0)])
def test_a_trace_is_stretched_and_keeps_its_shape(clustered: bool, least: float) -> None:
    times_s = [0.0, 1.0, 1.0, 4.0] * 1
    times_s += (4.0 + np.cumsum(np.full(2000, 0.5))).tolist()
    work = from_times(DOMAINS, times_s, 50.0, 1, clustered=clustered)
    gaps = np.diff(work.arrival_s)
    assert (len(times_s) - 1) / work.arrival_s[-1] == pytest.approx(50)
    assert gaps[:3] / gaps[-1] == pytest.approx([2, 0, 6])
    same = np.mean(of_domains(work)[1:] == of_domains(work)[:-1])
    assert same >= least
    assert same < (1.0 if clustered else 0.2)
