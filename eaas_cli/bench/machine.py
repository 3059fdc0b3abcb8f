"""The machine that a benchmark runs on, from /proc."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

from eaas.cores import usable_cores

__all__ = [
    "BusyElsewhere",
    "available_bytes",
    "busy_core_seconds",
    "describe_machine",
    "processor",
    "processor_s",
]

_PROC = Path("/proc")


def processor() -> str:
    """Model name of the processor."""
    for line in (_PROC / "cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def describe_machine() -> dict[str, Any]:
    """The entry `machine` of a document."""
    return {
        "processor": processor(),
        "cores": usable_cores(),
        "python": platform.python_version(),
    }


def available_bytes() -> int:
    """Memory that is available without swapping."""
    for line in (_PROC / "meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    raise OSError(f"{_PROC}/meminfo has no MemAvailable")


def busy_core_seconds() -> float:
    """Core seconds since boot that were not idle, stolen time included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, (_PROC / "stat").read_text().split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class BusyElsewhere:
    """Processor time that other processes use from now on."""

    def __init__(self) -> None:
        self._wall, self._all, self._own = time.monotonic(), busy_core_seconds(), _own_s()

    def cores(self) -> float:
        """Mean number of cores that other processes kept busy; call it after all children have ended."""
        others = busy_core_seconds() - self._all - (_own_s() - self._own)
        return round(max(0.0, others) / (time.monotonic() - self._wall), 2)


def _own_s() -> float:
    """Processor seconds of this process and of the children that have ended."""
    return sum(os.times()[:4])


def processor_s(pid: int) -> float:
    """Processor seconds of a process, ended threads included."""
    # The clock id of clock_getcpuclockid(3).
    return time.clock_gettime((~pid << 3) | 2)
