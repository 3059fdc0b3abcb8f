"""What a fault cost: sums over rounds that are known."""

from __future__ import annotations

import pytest

from benchmarks.failover import Strike, lost
from eaas_cli.bench.load import Asked, LoadResult
from eaas_cli.bench.stream import Answer


def round_of(began: float, seconds: float, gap: float = 0.0, text: str = "x") -> LoadResult:
    """100 tokens in ten pieces, evenly, but for a gap in the middle."""
    step = (seconds - gap) / 10
    stamps = tuple(began + step * (i + 1) + (gap if i >= 5 else 0.0) for i in range(10))
    answer = Answer(began, began + seconds, text, 100, stamps)
    return LoadResult(began, began + seconds, (Asked(0, began, answer),))


def strike(gap: float, cpu_s: float = 0.0, text: str = "x") -> Strike:
    """A round of 10 s, and one in which nothing comes for so long, from the middle on."""
    quiet, faulted = round_of(100.0, 10.0), round_of(200.0, 10.0 + gap, gap, text)
    return Strike("kill", "expert-server-1", 205.1, 205.1 + gap, cpu_s, quiet, faulted)


def test_a_pause_is_a_loss() -> None:
    sums = lost([strike(2.5), strike(2.5)], cores=2)
    assert sums["tokens_per_s_quiet"] == pytest.approx(10.0)
    assert sums["tokens_per_s_faulted"] == pytest.approx(8.0)
    assert sums["gross"] == pytest.approx(0.2)
    assert sums["seconds_per_fault"] == pytest.approx(2.5)
    assert sums["beyond_capacity"] == pytest.approx(0.2)
    assert sums["gross_error"] == pytest.approx(0.0)
    # 20 % and nothing: the mean of the two is as far from either as it is uncertain.
    assert lost([strike(2.5), strike(0.0)], cores=2)["gross_error"] == pytest.approx(0.1)
    # Processor time of replacements is lost capacity.
    sums = lost([strike(2.5, cpu_s=2.5)], cores=2)
    assert sums["capacity"] == pytest.approx(2.5 / (2 * 12.5))
    assert sums["beyond_capacity"] == pytest.approx(0.1)


def test_a_different_text_is_wrong_and_stalls_are_within_a_stream() -> None:
    assert [strike(0.0).wrong, strike(0.0, text="y").wrong] == [0, 1]
    assert strike(2.5).faulted.stall_s == pytest.approx(3.5)
    assert LoadResult(0.0, 1.0, ()).stall_s == 0.0
