"""Only cores of the process's affinity count."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eaas.config import ClusterConfig, ExpertServerConfig
from eaas.cores import usable_cores
from eaas_cli.local import LocalCluster, cluster


@pytest.fixture(autouse=True)
def affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """7 of 64 cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(10, 17)))


def test_cores_follow_the_affinity() -> None:
    assert usable_cores() == 7


@pytest.mark.parametrize(("servers", "wanted", "threads"), [(3, 0, 2), (8, 0, 1), (3, 5, 5)])
def test_a_cluster_divides_the_cores_among_its_servers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, servers: int, wanted: int, threads: int
) -> None:
    monkeypatch.setattr(cluster, "precheck", lambda _model: SimpleNamespace(tensors={}))
    commands: list[list[str]] = []

    def child(name: str, arguments: list[str], *_: object, **__: object) -> Any:
        commands.append(arguments)
        return SimpleNamespace(name=name, pid=1)

    monkeypatch.setattr(cluster, "ChildProcess", child)
    settings = ClusterConfig(expert_server=ExpertServerConfig(threads=wanted))
    local = LocalCluster(tmp_path, servers=servers, config=settings, attention_client=False)
    local._spawn_server(0)
    (command,) = commands
    assert command[command.index("--threads") + 1] == str(threads)
