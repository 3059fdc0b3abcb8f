"""`python -m benchmarks.failover`, small: one server and one cluster are killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.failover import bench_failover
from eaas_cli.local.fork_server import ForkServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def test_a_fault_and_the_same_work_without_it(
    checkpoint: Callable[..., Path], fork_server: ForkServer
) -> None:
    said: list[str] = []
    document = bench_failover(
        checkpoint(),
        servers=3,
        redundancy=2,
        faults=1,
        kinds=("kill",),
        streams=2,
        max_tokens=80,
        fixed_group=True,
        seed=1,
        transport="shm",
        say=said.append,
        fork_server=fork_server,
    )
    assert json.loads(json.dumps(document)) is not None
    (row,) = document["faults"]
    assert row["kind"] == "kill"
    assert row["tokens"] == 160
    assert row["replacement_cpu_s"] > 0
    assert document["failed_requests"] == document["wrong_answers"] == 0
    group = document["fixed_group"]
    # Those that were on their way failed; each was asked for again until it was answered.
    assert group["failed_requests"] >= 2
    assert group["worst_pause_ms"] > document["worst_stall_ms"]["faulted"]
    assert set(document["timeline"]) == {"quiet", "faulted", "fixed_group"}
    assert len(said) == 3
