"""Measures one MoE layer: loads random weights, then times every implementation for each batch size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from statistics import median

import torch

from eaas_cli.bench.experts.entrants import Entrants, find_entrants
from eaas_cli.bench.experts.limits import Limits
from eaas_cli.bench.experts.measure import affordable_rounds, in_turn
from eaas_cli.bench.experts.place import Compute, Place
from eaas_cli.bench.experts.plan import Plan, Shape
from eaas_cli.bench.experts.roofline import Speed, limit, stored_bytes
from eaas_cli.bench.experts.rows import Cell, Findings, auto_row, kernel_row
from eaas_cli.bench.experts.source import Batches, Source, source_form
from eaas_cli.bench.experts.stored import load_experts
from expert_server.kernels.kernel import UnsupportedError

__all__ = ["bench_layer"]

# Number of tokens at the start of every batch whose answers are computed in float64 for comparison.
_EXACT_TOKENS = 4
# Time limit of a cell (one batch size of a layer). Slow cells have fewer rounds.
_CELL_S = 30.0
# `batched_mm` is skipped if it would copy more bytes than this.
_MOST_COPIED_BYTES = 4 << 30
# Below this ratio of multiply time to read time, the multiply speed is not measured at each call.
_NEAR = 0.5
# Above it, the multiply speed is measured around each call, for this time or this share of the call.
_MULTIPLY_S, _MULTIPLY_SHARE = 0.04, 0.1

# (dtype of the weights, kernel) of a kernel; ("", name) of a baseline.
_Name = tuple[str, str]
# Kernels by dtype of the stored weights.
_Entrants = Mapping[str, Entrants]


def bench_layer(
    shape: Shape,
    dtypes: Iterable[str],
    plan: Plan,
    place: Place,
    limits: Limits,
    findings: Findings,
) -> None:
    """Measure all implementations on one MoE layer, add their rows to `findings`, and free its memory.

    Args:
        dtypes: Dtypes of the stored weights that share a dtype of products; measured in the same rounds.
        place: Where to measure.
        limits: Limits of the place for that dtype of products.
    """
    form = source_form(shape)
    with ExitStack() as stack:
        entrants: dict[str, Entrants] = {}
        for dtype in dtypes:
            entrants[dtype] = find_entrants(plan, place, shape, dtype, form, findings)
            for kernel in entrants[dtype].kernels.values():
                stack.callback(kernel.close)
        if not any(found.kernels for found in entrants.values()):
            return
        needed = _needed_bytes(shape, limits.dtype, entrants, plan)
        available = place.free_bytes()
        if needed > available:
            lack = (
                f"needs {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are free: "
                "name fewer kernels (--kernel) or fewer --dtype at a time"
            )
            for dtype, found in entrants.items():
                for name in found.kernels:
                    findings.skip(shape, dtype, name, lack)
            return
        findings.say(f"{shape} {limits.compute}: random weights")
        source = Source(shape, limits.dtype)
        _load(source, entrants, findings)
        batches = Batches(shape, limits.dtype, max(*plan.tokens, _EXACT_TOKENS))
        exact_TH = source.exact(batches.get(_EXACT_TOKENS, 0))
        source.move(place.at)
        baselines = _baselines(place, source, limits, findings)
        for tokens in plan.tokens:
            _bench_cell(
                tokens,
                source,
                batches,
                exact_TH,
                entrants,
                baselines,
                plan,
                place,
                limits,
                findings,
            )


def _load(source: Source, entrants: _Entrants, findings: Findings) -> None:
    for dtype, found in entrants.items():
        for name, kernel in found.kernels.items():
            findings.say(f"{source.shape} {dtype}: {name} loads the experts")
            load_experts(kernel, source, dtype)


def _baselines(
    place: Place, source: Source, limits: Limits, findings: Findings
) -> dict[_Name, Compute]:
    """Return those baselines that work here; record the others as skipped."""
    computes: dict[_Name, Compute] = {}
    for name in place.baselines:
        try:
            computes["", name] = place.baseline(name, source)
        except UnsupportedError as error:
            findings.skip(source.shape, limits.compute, name, str(error))
    return computes


def _needed_bytes(shape: Shape, compute: torch.dtype, entrants: _Entrants, plan: Plan) -> int:
    """Estimate the bytes for all kernels' and baselines' weights and calls; too many skip the layer."""
    held = [stored_bytes(shape, dtype) for dtype, found in entrants.items() for _ in found.kernels]
    weights = shape.num_experts * (sum(held) + shape.expert_size * compute.itemsize)
    pairs = max(plan.tokens) * shape.top_k
    # Each kernel keeps scratch space for the token-expert pairs, float32 at worst.
    scratch = len(held) * pairs * (shape.hidden + shape.intermediate) * 4
    # transformers keeps per pair: input, gate and up, their product, output with and without the score.
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
    entrants: _Entrants,
    baselines: Mapping[_Name, Compute],
    plan: Plan,
    place: Place,
    limits: Limits,
    findings: Findings,
) -> None:
    """Check the answers and measure the time of one batch size of a layer; add a row for each kernel.

    Args:
        tokens: T.
        exact_TH: Answer to the first tokens of the batch of seed 0, float64.
        entrants: Kernels that have loaded the experts, by dtype.
    """
    computes: dict[_Name, Compute] = {
        (dtype, name): partial(place.compute, kernel)
        for dtype, found in entrants.items()
        for name, kernel in found.kernels.items()
    }
    computes |= baselines
    copied = _copied_bytes(source.shape, source.dtype, tokens)
    if copied > _MOST_COPIED_BYTES and ("", "batched_mm") in computes:
        del computes["", "batched_mm"]
        reason = f"it would copy {copied / 1e9:.1f} GB of weights in each call"
        findings.skip(source.shape, limits.compute, "batched_mm", reason, tokens)

    # Step 1: warm up and check the answers.
    batch = batches.get(tokens, 0).to(place.at)
    seconds: dict[_Name, float] = {}
    errors: dict[_Name, float] = {}
    for name, compute in computes.items():
        for _ in range(place.warm_ups):
            compute(batch)
        seconds[name], answer_TH = place.timed(partial(compute, batch))
        errors[name] = _relative_error(answer_TH[:_EXACT_TOKENS].cpu(), exact_TH[:tokens])

    # Step 2: measure.
    rounds = affordable_rounds(plan.rounds, sum(seconds.values()), _CELL_S)
    findings.say(
        f"{source.shape} {limits.compute} T={tokens}: {len(computes)} implementations, {rounds} rounds"
    )
    typical = limits.typical()
    least = [limit(source.shape, dtype, tokens, batch.active, typical) for dtype in entrants]
    is_near = any(one.compute_s > _NEAR * one.memory_s for one in least)
    samples = in_turn(
        place,
        computes,
        (batches.get(tokens, seed).to(place.at) for seed in range(1, rounds + 1)),
        limits,
        multiply_s=max(_MULTIPLY_S, _MULTIPLY_SHARE * median(seconds.values())) if is_near else 0,
    )

    # Step 3: report.
    pooled = [sample for of in samples.values() for sample in of]
    cell = Cell(
        source.shape,
        tokens,
        {name: samples.get(("", name)) for name in place.baselines},
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


def _copied_bytes(shape: Shape, dtype: torch.dtype, tokens: int) -> int:
    """Bytes of weights that transformers' `batched_mm` copies in a call: an expert per token-expert pair."""
    return tokens * shape.top_k * shape.expert_size * dtype.itemsize


def _relative_error(answer_TH: torch.Tensor, exact_TH: torch.Tensor) -> float:
    return float((answer_TH.double() - exact_TH).norm() / exact_TH.norm())
