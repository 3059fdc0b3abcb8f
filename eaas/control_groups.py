"""Limits of the process's control groups (cgroups of versions 1 and 2): processor time and memory.

A container, a scheduler or systemd sets them, on the process's own group or on one above it. The kernel names
the group in /proc/self/cgroup and the mounted hierarchies in /proc/self/mountinfo (cgroups(7), proc(5)). A
container mounts a part of a hierarchy, or has a namespace in which names begin at its own group.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["ROOT", "core_quota", "free_bytes"]

ROOT = Path("/")
"""Where /proc and the hierarchies are; tests give another directory."""

_ESCAPED = re.compile(r"\\([0-7]{3})")


def core_quota(root: Path = ROOT) -> float | None:
    """Processor time that the groups allow, in cores; None: no limit, or the kernel does not tell."""
    quotas = []
    for group in _groups("cpu", root):
        version_2 = _read(group / "cpu.max").split()
        quota, period = (
            map(_number, version_2)
            if len(version_2) == 2
            else (_number(_read(group / f"cpu.cfs_{name}_us")) for name in ("quota", "period"))
        )
        if quota and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def free_bytes(root: Path = ROOT) -> int | None:
    """Bytes that the groups let their processes still take; None: no limit, or the kernel does not tell.

    Files' pages count as free, because the kernel drops them when it needs memory. `memory.high` counts as a
    limit, because above it the kernel slows the processes down.
    """
    free = []
    for group in _groups("memory", root):
        names = ("memory.max", "memory.high", "memory.limit_in_bytes")
        limits = [n for name in names if (n := _number(_read(group / name))) is not None]
        if limits:
            used = _number(
                _read(group / "memory.current") or _read(group / "memory.usage_in_bytes")
            )
            free.append(max(0, min(limits) - (used or 0) + _droppable(group)))
    return min(free, default=None)


def _droppable(group: Path) -> int:
    """Bytes of files' pages in a group and those below it; 0 if the kernel does not tell."""
    stat = dict(
        line.split(" ", 1) for line in _read(group / "memory.stat").splitlines() if " " in line
    )
    # In version 1 a name without total_ counts the group alone.
    kinds = ("inactive_file", "active_file")
    return sum(_number(stat.get(f"total_{kind}", stat.get(kind, ""))) or 0 for kind in kinds)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Directories of the process's group and of those above it, where the controller's files may be."""
    mounts = list(_mounts(controller, root))
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, name = (*line.split(":", 2), "", "")[:3]
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and controller not in controllers.split(","):
            continue
        own = PurePosixPath(name)
        seen = [(top, at) for of, top, at in mounts if of == version]
        for top, at in [(top, at) for top, at in seen if own.is_relative_to(top)] or seen:
            below = own.relative_to(top) if own.is_relative_to(top) else PurePosixPath()
            # A process outside its namespace's or container's own group sees no more than the mounted one.
            below = PurePosixPath() if ".." in below.parts else below
            yield from (at / group for group in (below, *below.parents))


def _mounts(controller: str, root: Path) -> Iterator[tuple[int, PurePosixPath, Path]]:
    """Version, topmost group and directory of each mounted hierarchy that may have the controller."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, file_system = line.partition(" - ")
        fields, system = mount.split(" "), file_system.split(" ")
        version = {"cgroup": 1, "cgroup2": 2}.get(system[0])
        if version is None or len(fields) < 5:
            continue
        # The last field of a hierarchy of version 1 names its controllers.
        if version == 2 or controller in system[-1].split(","):
            top, at = (_ESCAPED.sub(lambda m: chr(int(m[1], 8)), name) for name in fields[3:5])
            yield version, PurePosixPath(top), root / at.lstrip("/")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # no such file in this version or in this group, or hidden from this process
        return ""


def _number(text: str) -> int | None:
    """Parse a number; None: "max", -1 or nothing, which mean no limit."""
    return int(text) if re.fullmatch("[0-9]+", text) else None
