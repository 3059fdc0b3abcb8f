"""What a fault cost: sums over rounds that are known."""

from __future__ import annotations

import pytest

from benchmarks.failover import run
from benchmarks.failover.account import Strike, lost, phases
from benchmarks.failover.streams import Round
from eaas.errors import ClusterError
from eaas_cli.bench.stream import Answer


def round_of(began: float, seconds: float, gap: float = 0.0, text: str = "x") -> Round:
    """100 tokens in ten pieces, evenly, but for a gap in the middle."""
    step = (seconds - gap) / 10
    stamps = tuple(began + step * (i + 1) + (gap if i >= 5 else 0.0) for i in range(10))
    return Round(began, began + seconds, [Answer(began, began + seconds, text, 100, stamps)])


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


def test_the_error_comes_from_the_spread_of_faults() -> None:
    # 20 % and nothing: the mean of the two is as far from either as it is uncertain.
    assert lost([strike(2.5), strike(0.0)], cores=2)["gross_error"] == pytest.approx(0.1)


def test_processor_time_of_replacements_is_lost_capacity() -> None:
    sums = lost([strike(2.5, cpu_s=2.5)], cores=2)
    assert sums["capacity"] == pytest.approx(2.5 / (2 * 12.5))
    assert sums["beyond_capacity"] == pytest.approx(0.1)


def test_phases() -> None:
    found = phases([strike(2.5)])
    assert found["before"] == pytest.approx(10.0, rel=0.3)
    assert found["during"] == pytest.approx(0.0)
    assert found["after"] == pytest.approx(10.0, rel=0.3)


def test_a_different_text_is_wrong() -> None:
    assert strike(0.0).wrong == 0
    assert strike(0.0, text="y").wrong == 1


def test_stalls_are_within_a_stream() -> None:
    assert strike(2.5).faulted.stall_s == pytest.approx(3.5)
    assert Round().stall_s == 0.0


def test_a_round_that_ends_before_its_fault_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = object.__new__(run._Bench)
    bench._usual_s = 60.0
    late = {"at": 111.0, "back": 112.0, "round": round_of(100.0, 10.0)}
    met = {"at": 102.5, "back": 103.0, "round": round_of(100.0, 10.0)}
    rounds = iter([late, met, late, late, late])
    monkeypatch.setattr(bench, "_restart_all", lambda server: next(rounds))
    assert bench.restart_all("expert-server-0") is met
    assert run._pause(met) == pytest.approx(0.5)
    assert bench._usual_s == pytest.approx(10.0), "the next fault comes earlier"
    with pytest.raises(ClusterError, match="--max-tokens"):
        bench.restart_all("expert-server-0")
