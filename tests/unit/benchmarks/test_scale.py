"""The page on scale has the figures' command; the benchmark's parts, at a small size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.scale.cluster import Sizes
from benchmarks.scale.failures import simulate_failures, simulate_upgrade

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
