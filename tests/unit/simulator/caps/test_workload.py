"""Arrivals and loads match their parameters, also those of recorded routing."""

from pathlib import Path

import numpy as np
import pytest

from eaas.errors import TraceError
from simulator.caps.cells import run_cell
from simulator.caps.fit import DOMAINS
from simulator.caps.workload import PATTERNS, RecordedDomains, Workload, draw_workload
from simulator.traces import Trace, write_trace

LAYERS, EXPERTS = 2, 6
PAIRS = DOMAINS.tokens * DOMAINS.top_k


def of_domains(work: Workload) -> np.ndarray:
    """The domain of each request, told by its hot experts: requests of one share theirs."""
    hot_NE = work.load_NE >= 15
    _, domain_N = np.unique(hot_NE, axis=0, return_inverse=True)
    return domain_N


@pytest.mark.parametrize("pattern", PATTERNS)
def test_rate_and_loads(pattern: str) -> None:
    work, again, other = (
        draw_workload(DOMAINS, pattern, 20_000, 200.0, seed) for seed in (1, 1, 2)
    )
    assert len(work.arrival_s) / work.arrival_s[-1] == pytest.approx(200, rel=0.03)
    assert (np.diff(work.arrival_s) >= 0).all()
    assert (work.load_NE.sum(axis=1) == PAIRS).all()
    # 9 of 60 experts with weight 51: 9 in 10 pairs are on them.
    hottest_NE = np.sort(work.load_NE, axis=1)[:, -9:]
    assert hottest_NE.sum(axis=1).mean() == pytest.approx(0.9 * PAIRS, rel=0.01)
    assert work.predicted_NE is work.load_NE
    np.testing.assert_array_equal(again.load_NE, work.load_NE)
    assert not np.array_equal(other.arrival_s, work.arrival_s)


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
    work = draw_workload(DOMAINS, "bursty", 20_000, 100.0, 5)
    same_N = of_domains(work)[1:] == of_domains(work)[:-1]
    gap_s = np.diff(work.arrival_s)
    assert 1 / gap_s[same_N].mean() == pytest.approx(130, rel=0.05)


def test_a_prediction_is_another_sample_of_the_same_domain() -> None:
    work = draw_workload(DOMAINS, "poisson", 4000, 100.0, 1, predicted_pairs=40)
    assert work.predicted_NE.sum(axis=1) == pytest.approx(PAIRS)
    correlation = [
        np.corrcoef(a, b)[0, 1] for a, b in zip(work.load_NE, work.predicted_NE, strict=True)
    ]
    strangers = np.corrcoef(work.load_NE[0], work.predicted_NE[1])[0, 1]
    assert 0.75 < np.mean(correlation) < 0.95
    assert strangers < 0.75
    # What is loaded does not depend on what is predicted.
    unpredicted = draw_workload(DOMAINS, "poisson", 4000, 100.0, 1)
    np.testing.assert_array_equal(unpredicted.load_NE, work.load_NE)


@pytest.mark.parametrize(("pattern", "least", "most"), [("bursty", 0.9, 1.0), ("poisson", 0, 0.2)])
def test_a_trace_is_stretched_and_keeps_its_shape(pattern: str, least: float, most: float) -> None:
    times_s = [0.0, 1.0, 1.0, 4.0, *(4.0 + np.cumsum(np.full(2000, 0.5)))]
    work = draw_workload(DOMAINS, pattern, 0, 50.0, 1, times_s=times_s)
    gaps = np.diff(work.arrival_s)
    assert (len(times_s) - 1) / work.arrival_s[-1] == pytest.approx(50)
    assert gaps[:3] / gaps[-1] == pytest.approx([2, 0, 6])
    assert least <= np.mean(of_domains(work)[1:] == of_domains(work)[:-1]) < most


# -- recorded routing -------------------------------------------------------------------------------


def recorded(path: Path, hot: list[int], **notes: object) -> Path:
    """A trace that uses these experts of each layer only, the first one thrice as much."""
    counts_ILE = np.zeros((4, LAYERS, EXPERTS), np.uint8)
    counts_ILE[:, :, hot] = 1
    counts_ILE[:, :, hot[0]] = 3
    write_trace(Trace(counts_ILE, notes), path)
    return path


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    return [recorded(tmp_path / "a.npz", [0, 1], top_k=2), recorded(tmp_path / "b.npz", [3, 4, 5])]


def test_loads_are_those_of_the_traces(two: list[Path]) -> None:
    domains = RecordedDomains.of(DOMAINS, two)
    assert (domains.experts, domains.domains, domains.top_k) == (LAYERS * EXPERTS, 2, DOMAINS.top_k)
    assert RecordedDomains.of(DOMAINS, two[::-1]).top_k == 2
    work = draw_workload(domains, "poisson", 2000, 100.0, 1)
    load_NLE = work.load_NE.reshape(-1, LAYERS, EXPERTS)
    assert (load_NLE.sum(axis=2) == PAIRS).all()
    is_a_N = load_NLE[:, 0, 0] > 0
    assert 0.4 < is_a_N.mean() < 0.6
    for chosen_N, share_E in (
        (is_a_N, [0.75, 0.25, 0, 0, 0, 0]),
        (~is_a_N, [0, 0, 0, 0.6, 0.2, 0.2]),
    ):
        share_LE = load_NLE[chosen_N].mean(axis=0) / PAIRS
        np.testing.assert_allclose(share_LE, [share_E] * LAYERS, atol=0.01)


def test_choosing_pays_where_domains_differ_and_not_where_they_do_not(two, tmp_path) -> None:
    def gain(paths: list[Path]) -> float:
        entries = [("fcfs", "true"), ("greedy_variance", "true")]
        cell = run_cell("bursty", 400, 200.0, 1, entries, routing=[str(p) for p in paths])
        first, chosen = cell["figures"]
        return 1 - float(chosen["imbalance"]) / float(first["imbalance"])

    same = [recorded(tmp_path / f"same{i}.npz", [0, 1]) for i in range(2)]
    assert gain(two) > 0.05
    assert abs(gain(same)) < 0.02


@pytest.mark.parametrize(
    ("counts_ILE", "said"),
    [
        (np.ones((4, LAYERS, EXPERTS + 1), np.uint8), r"has \(2, 7\)"),
        (np.eye(LAYERS, EXPERTS, dtype=np.uint8)[None] * [[1], [0]], "has a layer without load"),
        (np.ones((2, 2, 1), np.uint8), "has one expert per layer"),
    ],
)
def test_traces_that_do_not_fit_are_refused(two, tmp_path, counts_ILE, said) -> None:
    other = tmp_path / "other.npz"
    write_trace(Trace(counts_ILE.astype(np.uint8)), other)
    paths = [other] if counts_ILE.shape[2] == 1 else [*two, other]
    with pytest.raises(TraceError, match=rf"other\.npz: {said}"):
        RecordedDomains.of(DOMAINS, paths)


@pytest.mark.parametrize("top_k", ["x", None, float("nan"), 1e308, -3, 0, True, 2.0])
def test_a_note_that_cannot_be_is_refused(tmp_path: Path, top_k: object) -> None:
    path = recorded(tmp_path / "a.npz", [0, 1], top_k=top_k)
    with pytest.raises(TraceError, match=r"a\.npz: its note top_k is "):
        RecordedDomains.of(DOMAINS, [path])
