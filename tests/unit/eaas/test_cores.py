"""Only cores of the process's affinity count, and of them no more than a quota pays for."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cgroup_tree import CgroupTree
from eaas import control_groups
from eaas.config import ClusterConfig, ExpertServerConfig
from eaas.cores import limit_thread_pools, usable_cores
from eaas_cli.local import LocalCluster, cluster


@pytest.fixture(autouse=True)
def affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """7 of 64 cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(10, 17)))


@pytest.fixture
def limited(tmp_path: Path) -> CgroupTree:
    """A process in a group of version 2."""
    tree = CgroupTree(tmp_path)
    tree.mount("/sys/fs/cgroup")
    tree.own("/")
    return tree


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max", 7), (6_400_000, 7), (700_000, 7), (299_999, 2), (100_000, 1), (50_000, 1)],
)
def test_cores_follow_affinity_and_quota(limited: CgroupTree, quota: object, cores: int) -> None:
    assert usable_cores(limited.root) == 7
    limited.write("/sys/fs/cgroup", cpu__max=f"{quota} 100000")
    assert usable_cores(limited.root) == cores


@pytest.mark.parametrize(
    ("quota", "given", "threads"), [(2.5, None, "2"), (2.5, "5", "5"), (None, None, None)]
)
def test_libraries_are_told_of_a_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, given: str | None, threads: str | None
) -> None:
    monkeypatch.setattr(control_groups, "core_quota", lambda _root: quota)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    limit_thread_pools()
    assert os.environ.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(("servers", "wanted", "threads"), [(3, 0, 2), (8, 0, 1), (3, 5, 5)])
def test_a_cluster_divides_the_cores_among_its_servers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, servers: int, wanted: int, threads: int
) -> None:
    monkeypatch.setattr(
        cluster, "precheck", lambda _model, **_: SimpleNamespace(tensors={}, matrices={})
    )
    commands: list[list[str]] = []

    def child(name: str, arguments: list[str], *_: object, **__: object) -> Any:
        commands.append(arguments)
        return SimpleNamespace(name=name, pid=1)

    monkeypatch.setattr(cluster, "ChildProcess", child)
    settings = ClusterConfig(expert_server=ExpertServerConfig(threads=wanted))
    local = LocalCluster(tmp_path, servers=servers, config=settings, clients=0)
    local._spawn_server(0)
    (command,) = commands
    assert command[command.index("--threads") + 1] == str(threads)
