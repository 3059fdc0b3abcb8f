"""Description and load of the machine that a benchmark runs on, from /proc and /sys."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

from eaas.cores import usable_cores

__all__ = [
    "BusyElsewhere",
    "busy_core_seconds",
    "describe_machine",
    "instruction_sets",
    "last_level_cache_bytes",
    "processor",
]

_PROC, _CPUS = Path("/proc"), Path("/sys/devices/system/cpu")
# CPU flags that decide the speed of matrix products, on x86 and ARM.
_FLAGS = (
    *("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve", "sve2", "sme"),
)
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def processor() -> str:
    """Model name of the machine's processor."""
    return _cpuinfo("model name") or platform.machine()


def describe_machine() -> dict[str, Any]:
    """Describe this machine, for the entry `machine` of a benchmark's document."""
    return {
        "processor": processor(),
        "cores": usable_cores(),
        "python": platform.python_version(),
    }


def instruction_sets() -> list[str]:
    """List the processor's instruction sets that speed up matrix products, for the document."""
    present = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return [flag for flag in _FLAGS if flag in present]


def last_level_cache_bytes() -> int:
    """Size of the last-level cache, for the document; 0 if unknown."""
    levels = [
        (int((index / "level").read_text()), (index / "size").read_text().strip())
        for index in (_CPUS / "cpu0" / "cache").glob("index*")
    ]
    if not levels:
        return 0
    _, size = max(levels)
    return int(size[:-1]) * _UNITS[size[-1]]


def busy_core_seconds() -> float:
    """Busy core seconds of the machine since boot, including stolen time."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, (_PROC / "stat").read_text().split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class BusyElsewhere:
    """Measures the processor time that processes outside the benchmark use from now on."""

    def __init__(self) -> None:
        self._wall, self._all, self._own = time.monotonic(), busy_core_seconds(), _own_s()

    def cores(self) -> float:
        """Mean number of cores that other processes kept busy; many spoil the benchmark.

        Call it after all children have ended.
        """
        others = busy_core_seconds() - self._all - (_own_s() - self._own)
        return round(max(0.0, others) / (time.monotonic() - self._wall), 2)


def _own_s() -> float:
    """Processor seconds of this process and of the children that have ended."""
    return sum(os.times()[:4])


def _cpuinfo(field: str) -> str:
    for line in (_PROC / "cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""
