"""`python -m benchmarks.dispatch`: its arithmetic and its options."""

from __future__ import annotations

from functools import partial

import pytest

from benchmarks.dispatch import parts
from benchmarks.dispatch.rows import Round, row_of
from benchmarks.harness.ratios import Turn
from benchmarks.harness.worker import Worker, working
from eaas.errors import ClusterError
from eaas_cli.bench.experts.plan import Shape


def test_differences_and_ratios_are_the_rounds_own() -> None:
    rounds = [
        Round(Turn(floor, floor, 20), Turn(call, call, 20))
        for floor, call in ((1, 100), (2, 50), (40, 120))
    ]
    row = row_of("shm", 64, 1, (328, 320), rounds)
    assert row["layer_call_us"] == {"p50": 100, "p99": 100}
    assert row["floor_us"] == {"p50": 2, "p99": 2}
    assert row["over_floor_us"] == 80  # of 99, 48, 80; and not 100 - 2
    assert row["times_floor"] == 25  # of 100, 25, 3; and not 100 / 2
    assert (row["rounds"], row["calls"]) == (3, 60)


def test_the_layer_needs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "free_bytes", lambda: 3 << 30)
    lack = parts.lack_of_memory(Shape(2048, 768, 128, 8))
    assert "needs 3.5 GB of memory, and 3.2 GB are free" in lack
    assert parts.lack_of_memory(Shape(64, 32, 4, 2)) == ""


def test_a_child_that_fails_is_quoted() -> None:
    start = partial(Worker, "broken", "benchmarks.harness.lone_server")
    with pytest.raises(ClusterError, match=r"broken ended .* KeyError: 'shape'"), working([start]):
        pass
