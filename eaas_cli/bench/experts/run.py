"""`eaas bench experts`, in the process of the command: the run and its document."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from eaas.cores import usable_cores
from eaas.errors import ConfigError
from eaas_cli.bench.experts.cpu import Cpu
from eaas_cli.bench.experts.entrants import spec_of
from eaas_cli.bench.experts.layer import bench_layer
from eaas_cli.bench.experts.limits import Limits, MultiplyLimit, ReadLimit
from eaas_cli.bench.experts.place import Place
from eaas_cli.bench.experts.plan import Plan, compute_dtype
from eaas_cli.bench.experts.rows import Findings
from eaas_cli.bench.figures import figure
from eaas_cli.bench.machine import (
    BusyElsewhere,
    instruction_sets,
    last_level_cache_bytes,
    processor,
)
from expert_server.kernels.kernel import UnsupportedError

__all__ = ["bench_experts"]


def bench_experts(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure kernels, the machine's limits and baselines in turn, in this process.

    Sets torch's number of threads.

    Returns:
        The document of `eaas bench experts --json`; figures are medians over the rounds.

    Raises:
        ConfigError: There is no such device, or nothing could be measured.
    """
    place = _place(plan)
    torch.set_num_threads(plan.threads)
    elsewhere = BusyElsewhere()
    findings = Findings(say)
    tuned = _tune(plan, place, say)
    say("the machine's limits")
    read = ReadLimit(place)
    computes: dict[str, list[str]] = {}
    for dtype in plan.dtypes:
        computes.setdefault(compute_dtype(dtype), []).append(dtype)
    multiply = {compute: MultiplyLimit(place, getattr(torch, compute)) for compute in computes}
    for shape in plan.shapes:
        for compute, dtypes in computes.items():
            bench_layer(shape, dtypes, plan, place, Limits(read, multiply[compute]), findings)
    if not findings.rows:
        reasons = (f"{entry['what']}: {entry['reason']}" for entry in findings.skipped)
        raise ConfigError(f"nothing could be measured: {'; '.join(dict.fromkeys(reasons))}")
    return {
        "machine": _machine(plan, read, multiply)
        | place.describe()
        | {"busy_cores_elsewhere": elsewhere.cores()},
        "rounds": plan.rounds,
        "rows": findings.rows,
        "auto": findings.auto,
        **tuned,
        "skipped": findings.skipped,
    }


def _place(plan: Plan) -> Place:
    if plan.device == "cpu":
        return Cpu(plan.threads)
    # Before a GPU is looked for.
    _refuse_weights(plan)
    from eaas_cli.bench.experts.cuda import Cuda

    return Cuda()


def _refuse_weights(plan: Plan) -> None:
    """Raise ConfigError if a GPU's kernel has no weights of a dtype of the plan."""
    from expert_server.kernels.gpu.packing import check_spec

    for dtype in plan.dtypes:
        try:
            check_spec(spec_of(dtype, plan.threads))
        except UnsupportedError as error:
            raise ConfigError(f"--device cuda --dtype {dtype}: {error}") from None


def _tune(plan: Plan, place: Place, say: Callable[[str], None]) -> dict[str, Any]:
    if not plan.tune:
        return {}
    from eaas_cli.bench.experts.tune import tune

    return {"tuned": tune(plan, place, say)}


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
    """Summarise all measurements of one machine limit during the run, for the document."""
    return {
        "median": figure(median(samples) / unit),
        "least": figure(min(samples) / unit),
        "most": figure(max(samples) / unit),
        "measurements": len(samples),
        "way": way,
    }
