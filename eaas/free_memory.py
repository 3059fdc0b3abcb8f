"""Free memory of the machine and of the container; imports no torch, because the launcher asks, too."""

from __future__ import annotations

from pathlib import Path

__all__ = ["available_bytes", "free_bytes"]

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(proc: Path = Path("/proc")) -> int:
    """Bytes of the machine's memory that are available without swapping.

    Raises:
        OSError: The kernel does not tell.
    """
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    raise OSError(f"{proc}/meminfo has no MemAvailable")


def free_bytes(cgroup: Path = _CGROUP) -> int:
    """Bytes that this process can still take: of the machine, and of its container.

    Raises:
        OSError: The kernel does not tell.
    """
    free = available_bytes()
    limit, used = _read_number(cgroup / "memory.max"), _read_number(cgroup / "memory.current")
    if limit is None or used is None:
        return free
    return min(free, max(0, limit - used + _cached_bytes(cgroup)))


def _cached_bytes(cgroup: Path) -> int:
    """Bytes of files' pages that the kernel drops when it needs memory; 0 if it does not tell."""
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat = dict(line.split() for line in lines)
    return int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))


def _read_number(path: Path) -> int | None:
    """Read a limit of a cgroup; None: there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not in a cgroup of version 2, or "max"
        return None
