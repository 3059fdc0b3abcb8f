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


def free_bytes() -> int:
    """Bytes that this process can still take: of the machine, and of its container.

    Raises:
        OSError: The kernel does not tell.
    """
    free = available_bytes()
    limit, used = _read_number(_CGROUP / "memory.max"), _read_number(_CGROUP / "memory.current")
    return free if limit is None or used is None else min(free, max(0, limit - used))


def _read_number(path: Path) -> int | None:
    """Read a limit of a cgroup; None: there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not in a cgroup of version 2, or "max"
        return None
