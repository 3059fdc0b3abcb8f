"""One batch size: every kernel of a layer and every implementation of transformers, in turn."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from statistics import median

import torch

from eaas_cli.bench.experts.entrants import Entrants
from eaas_cli.bench.experts.findings import Findings
from eaas_cli.bench.experts.limits import Limits
from eaas_cli.bench.experts.measure import Compute, affordable_rounds, in_turn, timed
from eaas_cli.bench.experts.plan import Plan, Shape
from eaas_cli.bench.experts.roofline import Speed, limit
from eaas_cli.bench.experts.rows import Cell, auto_row, kernel_row
from eaas_cli.bench.experts.source import BASELINES, Batch, Batches, Source
from expert_server.kernels.kernel import ExpertKernel

__all__ = ["EXACT_TOKENS", "MOST_COPIED_BYTES", "bench_cell", "copied_bytes"]

# The first tokens of every batch, whose answers are known in float64.
EXACT_TOKENS = 4
# Time limit of a cell; slow cells have fewer rounds.
_CELL_S = 30.0
# `batched_mm` is skipped if it would copy more.
MOST_COPIED_BYTES = 4 << 30
# Below this ratio of multiply time to read time, the multiply speed is not measured at each call.
_NEAR = 0.5
# Else it is measured around each call, for this time or this share of the call.
_MULTIPLY_S, _MULTIPLY_SHARE = 0.04, 0.1

# Dtype of the weights, and kernel; transformers' implementations have no dtype.
_Name = tuple[str, str]


def bench_cell(
    tokens: int,
    source: Source,
    batches: Batches,
    exact_TH: torch.Tensor,
    entrants: Mapping[str, Entrants],
    plan: Plan,
    limits: Limits,
    findings: Findings,
) -> None:
    """Add a row for each kernel.

    Args:
        tokens: T.
        source: The weights.
        batches: Batches of the source's shape.
        exact_TH: Answer to the first tokens of the batch of seed 0, float64.
        entrants: Dtype of the weights -> kernels, which hold the experts.
        plan: Plan of the run.
        limits: Limits of the machine.
        findings: Receives the rows.
    """
    computes: dict[_Name, Compute] = {
        (dtype, name): partial(_call, kernel)
        for dtype, found in entrants.items()
        for name, kernel in found.kernels.items()
    }
    computes |= {("", name): partial(source.compute, name) for name in BASELINES}
    copied = copied_bytes(source.shape, source.dtype, tokens)
    if copied > MOST_COPIED_BYTES:
        del computes["", "batched_mm"]
        reason = f"it would copy {copied / 1e9:.1f} GB of weights in each call"
        findings.skip(source.shape, limits.compute, "batched_mm", reason, tokens)

    # Step 1: warm up and check the answers.
    batch = batches.get(tokens, 0)
    seconds: dict[_Name, float] = {}
    errors: dict[_Name, float] = {}
    for name, compute in computes.items():
        seconds[name], answer_TH = timed(compute, batch)
        errors[name] = _relative_error(answer_TH[:EXACT_TOKENS], exact_TH[:tokens])

    # Step 2: measure.
    rounds = affordable_rounds(plan.rounds, sum(seconds.values()), _CELL_S)
    findings.say(
        f"{source.shape} {limits.compute} T={tokens}: {len(computes)} implementations, {rounds} rounds"
    )
    typical = limits.typical()
    least = [limit(source.shape, dtype, tokens, batch.active, typical) for dtype in entrants]
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
    for dtype, found in entrants.items():
        rows = {
            name: kernel_row(cell, dtype, name, samples[dtype, name], errors[dtype, name])
            for name in found.kernels
        }
        findings.rows += [row for name, row in rows.items() if name in found.shown]
        if found.picked:
            findings.rows.append(auto_row(rows[found.picked]))


def copied_bytes(shape: Shape, dtype: torch.dtype, tokens: int) -> int:
    """Bytes of weights that `batched_mm` copies in a call: those of each token-expert pair."""
    return tokens * shape.top_k * shape.expert_size * dtype.itemsize


def _call(kernel: ExpertKernel, batch: Batch) -> torch.Tensor:
    return kernel(batch.x_TH, batch.ids_TK, batch.scores_TK, 0)


def _relative_error(answer_TH: torch.Tensor, exact_TH: torch.Tensor) -> float:
    return float((answer_TH.double() - exact_TH).norm() / exact_TH.norm())
