"""One MoE layer: its weights in memory, and for each batch size every implementation in turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from statistics import median

import torch

from eaas_cli.bench.experts.limits import Limits
from eaas_cli.bench.experts.measure import Compute, affordable_rounds, in_turn, timed
from eaas_cli.bench.experts.plan import Plan, Shape, compute_dtype
from eaas_cli.bench.experts.roofline import Speed, limit, stored_bytes
from eaas_cli.bench.experts.rows import Cell, Findings, kernel_row
from eaas_cli.bench.experts.source import BASELINES, Batch, Batches, Source, source_form
from eaas_cli.bench.machine import available_bytes
from expert_server.kernels.kernel import ExpertKernel, KernelSpec, Quantization, UnsupportedError
from expert_server.kernels.registry import KERNEL_NAMES, create_kernel
from expert_server.weights.weights import ExpertForm

__all__ = ["bench_layer"]

# The first tokens of every batch, whose answers are known in float64.
_EXACT_TOKENS = 4
# Time limit of a cell; slow cells have fewer rounds.
_CELL_S = 30.0
# `batched_mm` is skipped if it would copy more.
_MOST_COPIED_BYTES = 4 << 30
# Below this ratio of multiply time to read time, the multiply speed is not measured at each call.
_NEAR = 0.5
# Else it is measured around each call, for this time or this share of the call.
_MULTIPLY_S, _MULTIPLY_SHARE = 0.04, 0.1

# Dtype of the weights, and kernel; transformers' implementations have no dtype.
_Name = tuple[str, str]
# Kernels by dtype of the stored weights, then by name.
_Kernels = Mapping[str, Mapping[str, ExpertKernel]]


def bench_layer(
    shape: Shape, dtypes: Iterable[str], plan: Plan, limits: Limits, findings: Findings
) -> None:
    """Measure a layer and free its memory.

    Args:
        dtypes: Dtypes of the stored weights that share a dtype of products; measured in the same rounds.
        limits: Limits of the machine for that dtype of products.
    """
    form = source_form(shape)
    with ExitStack() as stack:
        kernels = {dtype: _make_kernels(plan, shape, dtype, form, findings) for dtype in dtypes}
        for found in kernels.values():
            for kernel in found.values():
                stack.callback(kernel.close)
        if not any(kernels.values()):
            return
        needed, available = _needed_bytes(shape, limits.dtype, kernels, plan), available_bytes()
        if needed > available:
            lack = (
                f"needs {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are free: "
                "name fewer kernels (--kernel) or fewer --dtype at a time"
            )
            for dtype, found in kernels.items():
                for name in found:
                    findings.skip(shape, dtype, name, lack)
            return
        findings.say(f"{shape} {limits.compute}: random weights")
        source = Source(shape, limits.dtype)
        _load(source, kernels, findings)
        batches = Batches(shape, limits.dtype, max(*plan.tokens, _EXACT_TOKENS))
        exact_TH = source.exact(batches.get(_EXACT_TOKENS, 0))
        for tokens in plan.tokens:
            _bench_cell(tokens, source, batches, exact_TH, kernels, plan, limits, findings)


def _make_kernels(
    plan: Plan, shape: Shape, dtype: str, form: ExpertForm, findings: Findings
) -> dict[str, ExpertKernel]:
    """The plan's kernels that work on this machine, empty; the caller closes them.

    Without named kernels the reference takes no part: it is as fast as transformers' `eager`.
    """
    quantization = Quantization(dtype) if dtype.startswith("int") else Quantization.NONE
    spec = KernelSpec(getattr(torch, compute_dtype(dtype)), quantization, plan.threads)
    made = {}
    for name in plan.kernels or (name for name in KERNEL_NAMES if name != "reference"):
        try:
            made[name] = create_kernel(name, [form], spec)
        except UnsupportedError as error:
            findings.skip(shape, dtype, name, str(error))
    return made


def _load(source: Source, kernels: _Kernels, findings: Findings) -> None:
    for dtype, found in kernels.items():
        for name, kernel in found.items():
            findings.say(f"{source.shape} {dtype}: {name} loads the experts")
            for expert, weights in enumerate(source.experts()):
                kernel.load(0, expert, weights)


def _needed_bytes(shape: Shape, compute: torch.dtype, kernels: _Kernels, plan: Plan) -> int:
    """Memory for the weights of all kernels and of transformers, and for the calls."""
    held = [stored_bytes(shape, dtype) for dtype, found in kernels.items() for _ in found]
    weights = shape.num_experts * (sum(held) + shape.expert_size * compute.itemsize)
    pairs = max(plan.tokens) * shape.top_k
    # Each kernel keeps scratch space for the token-expert pairs, float32 at worst.
    scratch = len(held) * pairs * (shape.hidden + shape.intermediate) * 4
    # transformers holds per pair: input, gate and up, their product, output with and without the score.
    theirs = pairs * (4 * shape.hidden + 3 * shape.intermediate) * compute.itemsize
    copied = (_copied_bytes(shape, compute, tokens) for tokens in plan.tokens)
    return (
        weights + scratch + max([theirs, *(size for size in copied if size <= _MOST_COPIED_BYTES)])
    )


def _bench_cell(
    tokens: int,
    source: Source,
    batches: Batches,
    exact_TH: torch.Tensor,
    kernels: _Kernels,
    plan: Plan,
    limits: Limits,
    findings: Findings,
) -> None:
    """Add a row for each kernel.

    Args:
        tokens: T.
        exact_TH: Answer to the first tokens of the batch of seed 0, float64.
        kernels: They hold the experts.
    """
    computes: dict[_Name, Compute] = {
        (dtype, name): partial(_call, kernel)
        for dtype, found in kernels.items()
        for name, kernel in found.items()
    }
    computes |= {("", name): partial(source.compute, name) for name in BASELINES}
    copied = _copied_bytes(source.shape, source.dtype, tokens)
    if copied > _MOST_COPIED_BYTES:
        del computes["", "batched_mm"]
        reason = f"it would copy {copied / 1e9:.1f} GB of weights in each call"
        findings.skip(source.shape, limits.compute, "batched_mm", reason, tokens)

    # Step 1: warm up and check the answers.
    batch = batches.get(tokens, 0)
    seconds: dict[_Name, float] = {}
    errors: dict[_Name, float] = {}
    for name, compute in computes.items():
        seconds[name], answer_TH = timed(compute, batch)
        errors[name] = _relative_error(answer_TH[:_EXACT_TOKENS], exact_TH[:tokens])

    # Step 2: measure.
    rounds = affordable_rounds(plan.rounds, sum(seconds.values()), _CELL_S)
    findings.say(
        f"{source.shape} {limits.compute} T={tokens}: {len(computes)} implementations, {rounds} rounds"
    )
    typical = limits.typical()
    least = [limit(source.shape, dtype, tokens, batch.active, typical) for dtype in kernels]
    is_near = any(one.compute_s > _NEAR * one.memory_s for one in least)
    samples = in_turn(
        computes,
        (batches.get(tokens, seed) for seed in range(1, rounds + 1)),
        limits,
        multiply_s=max(_MULTIPLY_S, _MULTIPLY_SHARE * median(seconds.values())) if is_near else 0,
    )

    # Step 3: report.
    pooled = [sample for of in samples.values() for sample in of]
    cell = Cell(
        source.shape,
        tokens,
        {name: samples.get(("", name)) for name in BASELINES},
        Speed(
            median(sample.speed.read for sample in pooled),
            median(sample.speed.multiply for sample in pooled),
        ),
        median(sample.active for sample in pooled),
    )
    findings.rows += [
        kernel_row(cell, dtype, name, samples[dtype, name], errors[dtype, name])
        for dtype, found in kernels.items()
        for name in found
    ]


def _copied_bytes(shape: Shape, dtype: torch.dtype, tokens: int) -> int:
    """Bytes of weights that `batched_mm` copies in a call: those of each token-expert pair."""
    return tokens * shape.top_k * shape.expert_size * dtype.itemsize


def _call(kernel: ExpertKernel, batch: Batch) -> torch.Tensor:
    return kernel(batch.x_TH, batch.ids_TK, batch.scores_TK, 0)


def _relative_error(answer_TH: torch.Tensor, exact_TH: torch.Tensor) -> float:
    return float((answer_TH.double() - exact_TH).norm() / exact_TH.norm())
