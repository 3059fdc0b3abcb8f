"""Number of CPU cores for this process."""

from __future__ import annotations

import os

__all__ = ["usable_cores"]


def usable_cores() -> int:
    """Number of CPU cores that a container or `taskset` leaves this process; thread counts follow it."""
    return len(os.sched_getaffinity(0))
