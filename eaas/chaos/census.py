"""What processes hold, as Linux tells."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from eaas.chaos.history import Census

__all__ = ["census", "still_running"]

_PROC = Path("/proc")
_SHARED = "/dev/shm/"


def census(pids: Mapping[str, int]) -> dict[str, Census]:
    """Of each process that has not ended, by name."""
    alive = set(still_running(pids.values()))
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


def still_running(pids: Iterable[int]) -> list[int]:
    """Those of these processes that have not ended; one that nobody has reaped has ended."""
    return [pid for pid in pids if _state(pid) not in ("", "Z", "X")]


def _state(pid: int) -> str:
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    # The name before it may hold anything, but ends with the last bracket.
    return stat.rpartition(")")[2].split()[0]
