"""A cluster that nobody asks anything hardly uses the processor."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eaas.bench.machine import processor_s
from eaas.cli.client import fetch_status
from eaas.local import LocalCluster

pytestmark = [pytest.mark.integration, pytest.mark.alone, pytest.mark.timeout(120)]

SETTLE_S = 3.0
WATCH_S = 5.0
WATCHES = 6
MOST = 0.03  # of one core, all processes together


def watch(cluster: LocalCluster) -> dict[str, float]:
    """Name of each process -> cores that it uses."""
    before_s = {name: processor_s(child.pid) for name, child in cluster.children.items()}
    started = time.monotonic()
    time.sleep(WATCH_S)
    took_s = time.monotonic() - started
    return {
        name: (processor_s(child.pid) - before_s[name]) / took_s
        for name, child in cluster.children.items()
    }


def test_idle_cpu(
    checkpoint: Callable[..., Path], start_cluster: Callable[..., LocalCluster]
) -> None:
    """Monitor, balancer, three expert servers, a client with its HTTP endpoint."""
    cluster = start_cluster(checkpoint("qwen3_moe"))
    assert len(cluster.children) == 6
    time.sleep(SETTLE_S)
    # The same work takes longer beside a busy neighbour: what the cluster itself needs is the least.
    watched: list[dict[str, float]] = []
    while len(watched) < WATCHES and all(sum(used.values()) >= MOST for used in watched):
        watched.append(watch(cluster))
    assert min(sum(used.values()) for used in watched) < MOST, watched
    # Nobody's lease has lapsed meanwhile.
    members = fetch_status(cluster.endpoint)["members"]
    assert {m["id"]: (m["state"], m["incarnation"]) for m in members} == {
        name: ("SERVING", 1) for name in cluster.children
    }
