"""Memory, open files and shared memory of a cluster's processes, from /proc.

A process is identified by its pid and its start time in ticks since boot, because pids are reused.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from eaas_cli.chaos.history import Census

__all__ = ["birth", "census", "still_running"]

_PROC = Path("/proc")
_SHARED = "/dev/shm/"


def census(pids: Mapping[str, int], births: Mapping[int, int | None]) -> dict[str, Census]:
    """Count the memory, open files and mappings of each live process, by process name.

    A run does so before and after its faults; `check` compares the two.
    """
    alive = set(still_running(births))
    return {name: _of(pid) for name, pid in pids.items() if pid in alive}


def _of(pid: int) -> Census:
    proc = _PROC / str(pid)
    own = 0
    for line in (proc / "smaps_rollup").read_text().splitlines():
        field, _, value = line.partition(":")
        if field in ("Private_Clean", "Private_Dirty"):
            own += int(value.split()[0]) << 10
    segments = sum(_SHARED in line for line in (proc / "maps").read_text().splitlines())
    return Census(pid, own, len(os.listdir(proc / "fd")), segments)


def birth(pid: int) -> int | None:
    """Start time of a process in ticks since boot; None if it has ended. A zombie has ended."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # Fields from the third of proc_pid_stat(5); the second, the name, may contain any character, even ")".
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[22 - 3])


def still_running(births: Mapping[int, int | None]) -> list[int]:
    """Pids of the processes among `births` (pid -> start time) that still run, without reused pids."""
    return [pid for pid, born in births.items() if born is not None and birth(pid) == born]
