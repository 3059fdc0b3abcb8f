"""The page on scale has the figures' command; the benchmark's parts, at a small size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.scale.cluster import Sizes
from benchmarks.scale.costs import slot_bytes
from benchmarks.scale.failures import simulate_failures, simulate_upgrade
from eaas.wire.arena import Arena
from eaas.wire.header import WireDtype, payload_layout, result_length

ROOT = Path(__file__).parents[3]
SMALL = Sizes(24, 12, 3, clients=2, layers=1, experts=24)


def silent(_what: str) -> None:
    """Nobody is told."""


def test_the_slots_that_an_arena_has() -> None:
    payload = payload_layout(16, 64, 4, WireDtype.FLOAT32).total
    sizes = []
    for slots in (4, 5):
        arena = Arena.create_local(slots, payload, result_length(16, 64), 1)
        sizes.append(arena.size)
        arena.close()
    # Flag, doorbell and generation are part of it; the last are padded to 64 bytes.
    assert abs(sizes[1] - sizes[0] - slot_bytes(16, 64, 4)) <= 64


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
    parts = "--only connections --only monitor --only balancer --json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", *words.split(), *parts.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document.keys() == {"machine", "settings", "connections", "monitor", "balancer"}
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
    assert document["connections"]["server"]["threads"] >= 1
    assert document["connections"]["client"]["files"] >= 1
    assert len(document["balancer"]["policies"]) == 5


def test_bad_sizes_are_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scale", "--nodes", "5"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "--nodes 5" in done.stderr
    assert done.stderr.count("\n") == 1
