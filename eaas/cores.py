"""How many cores there are for this process."""

from __future__ import annotations

import os

__all__ = ["usable_cores"]


def usable_cores() -> int:
    """Cores that this process may run on: a container or `taskset` may leave it fewer than there are."""
    return len(os.sched_getaffinity(0))
