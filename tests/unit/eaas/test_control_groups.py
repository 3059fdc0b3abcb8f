"""Limits of control groups in fake trees of every kind that containers and schedulers make; free memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cgroup_tree import CgroupTree
from eaas import free_memory
from eaas.control_groups import core_quota, free_bytes

GIB = 1 << 30
NO_LIMIT = 9223372036854771712  # what version 1 shows


@pytest.fixture
def tree(tmp_path: Path) -> CgroupTree:
    return CgroupTree(tmp_path)


def test_memory_high_is_a_limit_and_files_pages_are_free(tree: CgroupTree) -> None:
    tree.mount("/sys/fs/cgroup")
    tree.own("/a")
    tree.write("/sys/fs/cgroup/a", memory__max=1000, memory__high=800, memory__current=700)
    assert free_bytes(tree.root) == 100
    stat = "anon 200\ninactive_file 300\nactive_file 50\nsomething"
    tree.write("/sys/fs/cgroup/a", memory__stat=stat)
    assert free_bytes(tree.root) == 450
    tree.write("/sys/fs/cgroup/a", memory__current=2000)
    assert free_bytes(tree.root) == 0


def test_version_1_with_a_hierarchy_for_each_controller(tree: CgroupTree) -> None:
    tree.mount("/sys/fs/cgroup/cpu,cpuacct", "cpu,cpuacct")
    tree.mount("/sys/fs/cgroup/memory", "memory")
    tree.mount("/sys/fs/cgroup/cpuset", "cpuset")
    tree.own("/slurm/job", "cpu,cpuacct", 5)
    tree.own("/slurm/job/step", "memory", 4)
    tree.own("/", "cpuset", 3)
    cpu, memory = "/sys/fs/cgroup/cpu,cpuacct/slurm", "/sys/fs/cgroup/memory/slurm/job"
    tree.write(f"{cpu}/job", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    tree.write(cpu, cpu__cfs_quota_us=150000, cpu__cfs_period_us=50000)
    own = {"memory__limit_in_bytes": NO_LIMIT, "memory__usage_in_bytes": 5}
    tree.write(f"{memory}/step", **own)
    # Names without total_ are of this group without those below it.
    stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 200\ntotal_active_file 30"
    tree.write(memory, memory__limit_in_bytes=1000, memory__usage_in_bytes=600, memory__stat=stat)
    assert core_quota(tree.root) == 3
    assert free_bytes(tree.root) == 630


def test_hybrid_version_1_with_an_empty_hierarchy_of_version_2(tree: CgroupTree) -> None:
    tree.mount("/sys/fs/cgroup/unified")
    tree.mount("/sys/fs/cgroup/memory", "memory")
    tree.own("/user.slice")
    tree.own("/user.slice", "name=systemd", 1)
    tree.own("/user.slice", "memory", 2)
    tree.write("/sys/fs/cgroup/unified/user.slice", cgroup__procs=1)
    group = "/sys/fs/cgroup/memory/user.slice"
    tree.write(group, memory__limit_in_bytes=100, memory__usage_in_bytes=1)
    assert free_bytes(tree.root) == 99
    assert core_quota(tree.root) is None


@pytest.mark.parametrize(
    ("own", "top", "group"),
    [
        ("/", "/", ""),  # a cgroup namespace
        ("/docker/ab", "/docker/ab", ""),  # the group alone is mounted, under the host's names
        ("/docker/ab/x", "/docker/ab", "x"),
        ("/../../other", "/", ""),  # outside its namespace
        ("/other", "/docker/ab", ""),
        ("/../ab/x", "/../ab", "x"),
    ],
)
def test_in_a_container(tree: CgroupTree, own: str, top: str, group: str) -> None:
    tree.mount("/sys/fs/cgroup", top=top)
    tree.own(own)
    limits = {"cpu__max": "100000 100000", "memory__max": 100, "memory__current": 30}
    tree.write(f"/sys/fs/cgroup/{group}", **limits)
    assert core_quota(tree.root) == 1
    assert free_bytes(tree.root) == 70


def test_the_mount_with_the_own_group_counts_and_no_other_group(tree: CgroupTree) -> None:
    tree.mount("/elsewhere", top="/docker/other")
    tree.mount("/a mount", top="/docker/ab")
    tree.own("/docker/ab")
    tree.write("/elsewhere", cpu__max="1000 100000")
    tree.write("/a mount/job_8", cpu__max="1000 100000")
    tree.write("/a mount", cpu__max="400000 100000")
    assert core_quota(tree.root) == 4


@pytest.mark.parametrize(
    "text", ["", "max", "max 100000", "100000", "a b", "1 0", "-1 5", "1 2 3", "\udcff"]
)
def test_what_is_not_a_limit(tree: CgroupTree, text: str) -> None:
    tree.mount("/sys/fs/cgroup")
    tree.own("/")
    group = tree.root / "sys/fs/cgroup"
    for name in ("cpu.max", "memory.max", "memory.current", "memory.stat"):
        (group / name).write_bytes(text.encode(errors="surrogateescape"))
    assert core_quota(tree.root) is None
    assert free_bytes(tree.root) == (100000 - 100000 if text == "100000" else None)


LINES = st.lists(st.text("0:/-. \\cpu,mory2grax", max_size=40), max_size=4).map("\n".join)


@given(own=LINES, mounted=LINES)
@example(own="\nx\n0\n0:\n::\n1:cpu", mounted="\nx\n0\n - \na b c d e - cgroup2")
def test_any_text_in_the_kernels_files_is_read(own: str, mounted: str) -> None:
    with tempfile.TemporaryDirectory() as root:
        tree = CgroupTree(Path(root))
        assert core_quota(tree.root) is free_bytes(tree.root) is None
        (tree.root / "proc/self/cgroup").write_text(own)
        (tree.root / "proc/self/mountinfo").write_text(
            f"{mounted}\n1 2 0:3 / {mounted[:9]} rw - cgroup2 x rw"
        )
        assert core_quota(tree.root) is None
        assert free_bytes(tree.root) is None


LIMITS = st.tuples(st.none() | st.integers(1, 1000), st.none() | st.integers(0, 1000))
"""A group's quota, in tenths of a core, and its limit of memory; None: no limit."""


@given(
    groups=st.lists(LIMITS, min_size=1, max_size=6),
    hidden=st.integers(0, 5),
    has_version_1=st.booleans(),
    is_namespace=st.booleans(),
)
def test_the_lowest_limit_of_the_visible_groups_counts(
    groups: list[tuple[int | None, int | None]],
    hidden: int,
    has_version_1: bool,
    is_namespace: bool,
) -> None:
    hidden = min(hidden, len(groups) - 1)
    names = [f"g{n}" for n in range(1, len(groups))]  # the first group is the root
    top, below = names[:hidden], names[hidden:]
    own = "/" + "/".join(below if is_namespace else names)
    seen = "/" if is_namespace else "/" + "/".join(top)
    visible = groups[hidden:]
    with tempfile.TemporaryDirectory() as root:
        tree = CgroupTree(Path(root))
        for number, controllers in enumerate(("cpu", "memory") if has_version_1 else ("",)):
            at = f"/cg/{controllers}"
            tree.mount(at, controllers, seen)
            tree.own(own, controllers, number)
            for depth, (quota, limit) in enumerate(visible):
                place = "/".join((at, *below[:depth]))
                if has_version_1:
                    files = {"cpu__cfs_quota_us": -1 if quota is None else quota * 1000}
                    files |= {"cpu__cfs_period_us": 10000, "memory__usage_in_bytes": 100}
                    files |= {"memory__limit_in_bytes": NO_LIMIT if limit is None else limit}
                    tree.write(place, **files)
                else:
                    quota_text = "max" if quota is None else str(quota * 1000)
                    limit_text = "max" if limit is None else str(limit)
                    tree.write(place, cpu__max=f"{quota_text} 10000", memory__current=100)
                    tree.write(place, memory__max=limit_text)
        quotas = [quota / 10 for quota, _ in visible if quota is not None]
        free = [max(0, limit - 100) for _, limit in visible if limit is not None]
        if has_version_1:
            free.append(NO_LIMIT - 100)
        assert core_quota(tree.root) == min(quotas, default=None)
        assert free_bytes(tree.root) == (min(free) if free else None)


def test_the_least_of_machine_and_control_groups(tmp_path: Path) -> None:
    tree = CgroupTree(tmp_path, free=4096)
    assert free_memory.free_bytes(tmp_path) == 4096
    tree.mount("/sys/fs/cgroup")
    tree.own("/job")
    tree.write("/sys/fs/cgroup/job", memory__max="max", memory__current=900)
    assert free_memory.free_bytes(tmp_path) == 4096
    tree.write("/sys/fs/cgroup/job", memory__max=100_000)
    assert free_memory.free_bytes(tmp_path) == 4096
    tree.write("/sys/fs/cgroup/job", memory__max=1000)
    assert free_memory.free_bytes(tmp_path) == 100


def test_available_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "proc" / "meminfo"
    meminfo.parent.mkdir()
    meminfo.write_text("MemTotal:  8000 kB\nMemFree:  10 kB\nMemAvailable:  3000 kB\n")
    assert free_memory.free_bytes(tmp_path) == 3000 * 1024
    meminfo.write_text("MemTotal:  8000 kB\n")
    with pytest.raises(OSError, match="no MemAvailable"):
        free_memory.free_bytes(tmp_path)


def test_this_machine() -> None:
    assert 0 < free_memory.free_bytes() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
