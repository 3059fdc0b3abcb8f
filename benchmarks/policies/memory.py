"""Peak memory of planning, in a process of its own: resident, of NumPy and of the compiled loops alike."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.policies.loads import loads
from benchmarks.policies.sizes import Size, parse_size

__all__ = ["peak_mb"]

_STATUS = Path("/proc/self/status")
_DEADLINE_S = 600.0


def peak_mb(policy: str, size: Size) -> float | None:
    """Plan twice, the second time with the first plan as the current one; return what that adds to a process.

    Returns:
        MB, loads and plans included; None where the system does not tell (other than Linux).

    Raises:
        subprocess.SubprocessError: The planning process failed, or took more than ten minutes.
    """
    if not _STATUS.exists():
        return None
    task = f"{size.layers},{size.experts},{size.servers},{size.slots}"
    words = [sys.executable, "-m", "benchmarks.policies.memory", policy, task]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=_DEADLINE_S)
    return float(done.stdout)


def _main(policy: str, task: str) -> None:
    from balancer.policies import plan

    size = parse_size(task)
    before = _read("VmRSS")
    load_LE, later_LE = loads(size)
    first = plan(policy, load_LE, size.servers, size.slots)
    plan(policy, later_LE, size.servers, size.slots, current=first)
    print((_read("VmHWM") - before) / 1e6)


def _read(name: str) -> int:
    """Return a value of the process's memory in bytes: resident now (VmRSS), or at its peak (VmHWM)."""
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {name}")


if __name__ == "__main__":
    _main(*sys.argv[1:])
