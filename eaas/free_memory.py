"""Free memory of the machine and of the control groups; imports no torch, because the launcher asks, too."""

from __future__ import annotations

from pathlib import Path

from eaas import control_groups

__all__ = ["available_bytes", "free_bytes"]


def available_bytes(root: Path = control_groups.ROOT) -> int:
    """Bytes of the machine's memory that are available without swapping.

    Raises:
        OSError: The kernel does not tell.
    """
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    raise OSError(f"{root / 'proc/meminfo'} has no MemAvailable")


def free_bytes(root: Path = control_groups.ROOT) -> int:
    """Bytes that this process can still take: of the machine, and of its control groups.

    Raises:
        OSError: The kernel does not tell.
    """
    free, allowed = available_bytes(root), control_groups.free_bytes(root)
    return free if allowed is None else min(free, allowed)
