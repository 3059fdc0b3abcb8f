"""Domains with recorded routing: requests load what the traces loaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eaas.errors import TraceError
from simulator.caps.cell import run_cell
from simulator.caps.fit import DOMAINS
from simulator.caps.workload import RecordedDomains, poisson
from simulator.traces import Trace, write_trace

LAYERS, EXPERTS = 2, 6


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
    work = poisson(domains, 2000, 100.0, 1)
    load_NLE = work.load_NE.reshape(-1, LAYERS, EXPERTS)
    assert (load_NLE.sum(axis=2) == DOMAINS.tokens * DOMAINS.top_k).all()
    of_a_N = load_NLE[:, 0, 0] > 0
    assert 0.4 < of_a_N.mean() < 0.6
    share_LE = load_NLE[of_a_N].mean(axis=0) / (DOMAINS.tokens * DOMAINS.top_k)
    np.testing.assert_allclose(share_LE, [[0.75, 0.25, 0, 0, 0, 0]] * LAYERS, atol=0.01)
    share_LE = load_NLE[~of_a_N].mean(axis=0) / (DOMAINS.tokens * DOMAINS.top_k)
    np.testing.assert_allclose(share_LE, [[0, 0, 0, 0.6, 0.2, 0.2]] * LAYERS, atol=0.01)


def test_the_experts_per_token_are_the_recorded_ones(tmp_path: Path) -> None:
    paths = [recorded(tmp_path / f"{name}.npz", [1, 2], top_k=2) for name in "ab"]
    assert RecordedDomains.of(DOMAINS, paths).top_k == 2


def test_choosing_pays_where_domains_differ_and_not_where_they_do_not(
    two: list[Path], tmp_path: Path
) -> None:
    def gain(paths: list[Path]) -> float:
        entries = [("fcfs", "true"), ("greedy_variance", "true")]
        cell = run_cell("bursty", 400, 200.0, 1, entries, routing=[str(p) for p in paths])
        first, chosen = cell["figures"]
        return 1 - float(chosen["imbalance"]) / float(first["imbalance"])

    same = [recorded(tmp_path / f"same{i}.npz", [0, 1]) for i in range(2)]
    assert gain(two) > 0.05
    assert abs(gain(same)) < 0.02


def test_traces_of_two_shapes_are_refused(two: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other.npz"
    write_trace(Trace(np.ones((4, LAYERS, EXPERTS + 1), np.uint8)), other)
    with pytest.raises(TraceError, match=r"other\.npz: has \(2, 7\)"):
        RecordedDomains.of(DOMAINS, [*two, other])
    empty = np.ones((4, LAYERS, EXPERTS), np.uint8)
    empty[:, 1] = 0
    write_trace(Trace(empty), other)
    with pytest.raises(TraceError, match="without load"):
        RecordedDomains.of(DOMAINS, [*two, other])


@pytest.mark.parametrize("top_k", ["x", None, float("nan"), 1e308, -3, 0, True, 2.0])
def test_a_note_that_cannot_be_is_refused(tmp_path: Path, top_k: object) -> None:
    path = recorded(tmp_path / "a.npz", [0, 1], top_k=top_k)
    with pytest.raises(TraceError, match=r"a\.npz: its note top_k is "):
        RecordedDomains.of(DOMAINS, [path])


def test_one_expert_is_no_choice(tmp_path: Path) -> None:
    write_trace(Trace(np.ones((2, 2, 1), np.uint8)), tmp_path / "one.npz")
    with pytest.raises(TraceError, match=r"one\.npz: has one expert per layer"):
        RecordedDomains.of(DOMAINS, [tmp_path / "one.npz"])
