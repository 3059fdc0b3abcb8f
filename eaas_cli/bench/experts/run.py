"""`eaas bench experts`: the run and its document."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from eaas.cores import usable_cores
from eaas.errors import ConfigError
from eaas_cli.bench.experts.findings import Findings
from eaas_cli.bench.experts.layer import bench_layer
from eaas_cli.bench.experts.limits import Limits, MultiplyLimit, ReadLimit
from eaas_cli.bench.experts.plan import Plan, compute_dtype
from eaas_cli.bench.machine import (
    busy_core_seconds,
    instruction_sets,
    last_level_cache_bytes,
    processor,
)

__all__ = ["bench_experts"]


def bench_experts(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure kernels, the machine's limits and transformers' implementations, in turn.

    Sets torch's number of threads.

    Args:
        plan: Plan of the run.
        say: Prints a line of progress.

    Returns:
        The document of `eaas bench experts --json`; figures are medians over the rounds.

    Raises:
        ConfigError: Nothing could be measured.
    """
    torch.set_num_threads(plan.threads)
    began = _Clock.now()
    findings = Findings(say)
    say("the machine's limits")
    read = ReadLimit(plan.threads)
    computes: dict[str, list[str]] = {}
    for dtype in plan.dtypes:
        computes.setdefault(compute_dtype(dtype), []).append(dtype)
    multiply = {compute: MultiplyLimit(getattr(torch, compute)) for compute in computes}
    for shape in plan.shapes:
        for compute, dtypes in computes.items():
            bench_layer(shape, dtypes, plan, Limits(read, multiply[compute]), findings)
    if not findings.rows:
        reasons = (f"{entry['what']}: {entry['reason']}" for entry in findings.skipped)
        raise ConfigError(f"nothing could be measured: {'; '.join(dict.fromkeys(reasons))}")
    return {
        "machine": _machine(plan, read, multiply)
        | {"busy_cores_elsewhere": round(_Clock.now().busy_elsewhere_since(began), 2)},
        "rounds": plan.rounds,
        "rows": findings.rows,
        "auto": findings.auto,
        "skipped": findings.skipped,
    }


@dataclass(frozen=True)
class _Clock:
    """Seconds of the wall clock, of all cores, and of this process."""

    wall: float
    all_cores: float
    own: float

    @classmethod
    def now(cls) -> _Clock:
        return cls(time.monotonic(), busy_core_seconds(), time.process_time())

    def busy_elsewhere_since(self, began: _Clock) -> float:
        """Mean number of cores that other processes kept busy."""
        others = (self.all_cores - began.all_cores) - (self.own - began.own)
        return max(0.0, others) / (self.wall - began.wall)


def _machine(plan: Plan, read: ReadLimit, multiply: dict[str, MultiplyLimit]) -> dict[str, Any]:
    import transformers

    return {
        "processor": processor(),
        "instruction_sets": instruction_sets(),
        "cores": usable_cores(),
        "threads": plan.threads,
        "last_level_cache_mb": last_level_cache_bytes() >> 20,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "read_gb_per_s": _limit(read.way, read.samples, 1e9),
        "gemm_tflops": {
            compute: _limit(limit.way, limit.samples, 1e12) for compute, limit in multiply.items()
        },
    }


def _limit(way: str, samples: Sequence[float], unit: float) -> dict[str, Any]:
    """Statistics over all measurements of the run."""
    return {
        "median": round(median(samples) / unit, 3),
        "least": round(min(samples) / unit, 3),
        "most": round(max(samples) / unit, 3),
        "measurements": len(samples),
        "way": way,
    }
