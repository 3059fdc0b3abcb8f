"""Benchmarks of scale and of failures at a small size, and sums over known rounds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.failover import Strike, lost
from benchmarks.scale.cluster import Sizes
from benchmarks.scale.failures import simulate_failures, simulate_upgrade
from eaas_cli.bench.load import Asked, LoadResult
from eaas_cli.bench.stream import Answer

ROOT = Path(__file__).parents[3]
SMALL = Sizes(24, 12, 3, clients=2, layers=1, experts=24)


def silent(_what: str) -> None:
    """Nobody is told."""


def test_losses() -> None:
    rows = {row["what"]: row for row in simulate_failures(SMALL, silent)}
    assert [rows[what]["servers"] for what in ("server", "node", "rack")] == [1, 2, 8]
    assert rows["node"]["uncovered"] == rows["rack"]["uncovered"] == 0.0
    assert 0 < rows["server"]["single"] < rows["node"]["single"] < rows["rack"]["single"]
    assert rows["rack, not named"]["uncovered"] > 0
    assert all(row["whole_s"] > SMALL.lease_s + SMALL.grace_s for row in rows.values())


def test_upgrades() -> None:
    rows = {row["what"]: row for row in simulate_upgrade(SMALL, silent)}
    assert [rows[how]["steps"] for how in ("drained", "restarted", "node restarted")] == [
        24,
        24,
        12,
    ]
    assert rows["drained"]["single"] == 0.0
    assert 0 < rows["restarted"]["single"] < rows["node restarted"]["single"]
    assert all(row["uncovered"] == 0.0 for row in rows.values())
    assert all(row["step_s"] >= SMALL.restart_s for row in rows.values())


@pytest.mark.integration
def test_the_whole_at_a_small_size() -> None:
    words = "--servers 24 --nodes 12 --racks 3 --clients 2 --layers 1 --experts 24"
    parts = "--only monitor --only balancer --json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", *words.split(), *parts.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document.keys() == {"machine", "settings", "monitor", "balancer"}
    monitor = document["monitor"]
    assert monitor["members"] == 26
    assert monitor["snapshot"]["bytes"] > 1000
    assert monitor["reach"]["bytes"] > 24 * 20
    for kind in ("quiet", "storm", "watched"):
        found = monitor[kind]
        # Seconds are short: a turn more or less is much.
        assert 0.4 * 26 < found["heartbeats_per_s"] < 2 * 26
        assert found["lapsed"] == 0
        assert 0 < found["answer_ms"]["p50"] <= found["answer_ms"]["p99"]
        assert found["hold_cpu_ms"] > 0
    assert monitor["quiet"]["snapshots"] == monitor["quiet"]["watched_per_s"] == 0
    assert monitor["storm"]["snapshots"] > 50
    assert monitor["watched"]["watched_per_s"] > 0
    assert len(document["balancer"]["policies"]) == 5


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
