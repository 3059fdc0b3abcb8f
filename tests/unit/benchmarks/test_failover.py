"""What a fault cost: sums over rounds that are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.failover import run
from benchmarks.failover.account import Strike, lost, phases, timeline
from benchmarks.failover.report import draw_plot, print_report
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


def test_a_timeline_has_every_token() -> None:
    quiet = [round_of(0.0, 10.0), round_of(50.0, 10.0)]
    points = timeline(quiet, 1.0)
    # The very last piece comes as the round ends.
    assert sum(rate for _, rate in points) == pytest.approx(200, abs=21)
    assert [at for at, _ in points] == pytest.approx(range(20))


def test_a_different_text_is_wrong() -> None:
    assert strike(0.0).wrong == 0
    assert strike(0.0, text="y").wrong == 1


def test_stalls_are_within_a_stream() -> None:
    assert strike(2.5).faulted.stall_s == pytest.approx(3.5)
    assert Round().stall_s == 0.0


DOCUMENT = {
    "servers": 8,
    "redundancy": 2,
    "faults": [
        {
            "kind": "kill",
            "server": "expert-server-1",
            "quiet_s": 5.0,
            "faulted_s": 5.1,
            "stall_ms": 51.0,
            "whole_again_s": 1.1,
            "replacement_cpu_s": 0.4,
        }
    ],
    "lost": {
        "tokens_per_s_quiet": 100.0,
        "tokens_per_s_faulted": 99.0,
        "gross": 0.01,
        "gross_error": 0.002,
        "capacity": 0.02,
        "beyond_capacity": -0.01,
        "seconds_per_fault": 0.05,
    },
    "failed_requests": 0,
    "wrong_answers": 0,
    "worst_stall_ms": {"quiet": 30.0, "faulted": 51.0},
    "fixed_group": {
        "lost": 0.4,
        "failed_requests": 40,
        "down_s": {"mean": 3.0, "worst": 3.5},
        "worst_pause_ms": 3600.0,
    },
    "timeline": {"quiet": [(0.0, 1.0), (1.0, 2.0)], "fixed_group": [(0.0, 0.0), (1.0, 2.0)]},
}


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(DOCUMENT)
    told = capsys.readouterr().out
    for words in ("expert-server-1", "beyond that -1.00%", "failed requests: 0", "40.0% lost"):
        assert words in told


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_plot(DOCUMENT, tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


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
