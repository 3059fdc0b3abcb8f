"""Free memory of the machine and of the control groups; imports no torch, because the launcher asks, too."""

from __future__ import annotations

import re
from pathlib import Path

from eaas import control_groups

__all__ = ["free_bytes"]


def free_bytes(root: Path = control_groups.ROOT) -> int:
    """Bytes that this process can still take: of the machine without swapping, and of its control groups.

    Raises:
        OSError: The kernel does not tell.
    """
    found = re.search(
        r"^MemAvailable:\s*(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE
    )
    if found is None:
        raise OSError(f"{root / 'proc/meminfo'} has no MemAvailable")
    available, allowed = int(found[1]) << 10, control_groups.free_bytes(root)
    return available if allowed is None else min(available, allowed)
