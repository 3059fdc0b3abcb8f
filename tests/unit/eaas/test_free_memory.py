"""Free memory of machine and container."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cgroup_tree import CgroupTree
from eaas.free_memory import free_bytes


def test_the_least_of_machine_and_control_groups(tmp_path: Path) -> None:
    tree = CgroupTree(tmp_path, free=4096)
    assert free_bytes(tmp_path) == 4096
    tree.mount("/sys/fs/cgroup")
    tree.own("/job")
    tree.write("/sys/fs/cgroup/job", memory__max="max", memory__current=900)
    assert free_bytes(tmp_path) == 4096
    tree.write("/sys/fs/cgroup/job", memory__max=100_000)
    assert free_bytes(tmp_path) == 4096
    tree.write("/sys/fs/cgroup/job", memory__max=1000)
    assert free_bytes(tmp_path) == 100


def test_available_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "proc" / "meminfo"
    meminfo.parent.mkdir()
    meminfo.write_text("MemTotal:  8000 kB\nMemFree:  10 kB\nMemAvailable:  3000 kB\n")
    assert free_bytes(tmp_path) == 3000 * 1024
    meminfo.write_text("MemTotal:  8000 kB\n")
    with pytest.raises(OSError, match="no MemAvailable"):
        free_bytes(tmp_path)


def test_this_machine() -> None:
    assert 0 < free_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
