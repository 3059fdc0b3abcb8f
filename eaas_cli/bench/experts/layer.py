"""One MoE layer: its weights in memory, once per kernel and once for transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack

import torch

from eaas_cli.bench.experts.cell import EXACT_TOKENS, MOST_COPIED_BYTES, bench_cell, copied_bytes
from eaas_cli.bench.experts.entrants import Entrants, find_entrants
from eaas_cli.bench.experts.findings import Findings
from eaas_cli.bench.experts.limits import Limits
from eaas_cli.bench.experts.plan import Plan, Shape
from eaas_cli.bench.experts.roofline import stored_bytes
from eaas_cli.bench.experts.source import Batches, Source, source_form
from eaas_cli.bench.machine import available_bytes

__all__ = ["bench_layer"]


def bench_layer(
    shape: Shape, dtypes: Iterable[str], plan: Plan, limits: Limits, findings: Findings
) -> None:
    """Measure a layer and free its memory.

    Args:
        shape: Shape of the layer.
        dtypes: Dtypes of the stored weights that share a dtype of products; measured in the same rounds.
        plan: Plan of the run.
        limits: Limits of the machine for that dtype of products.
        findings: Receives the rows.
    """
    form = source_form(shape)
    with ExitStack() as stack:
        entrants: dict[str, Entrants] = {}
        for dtype in dtypes:
            entrants[dtype] = find_entrants(plan, shape, dtype, form, findings)
            for kernel in entrants[dtype].kernels.values():
                stack.callback(kernel.close)
        if not any(found.kernels for found in entrants.values()):
            return
        needed, available = _needed_bytes(shape, limits.dtype, entrants, plan), available_bytes()
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
        batches = Batches(shape, limits.dtype, max(*plan.tokens, EXACT_TOKENS))
        exact_TH = source.exact(batches.get(EXACT_TOKENS, 0))
        for tokens in plan.tokens:
            bench_cell(tokens, source, batches, exact_TH, entrants, plan, limits, findings)


def _load(source: Source, entrants: Mapping[str, Entrants], findings: Findings) -> None:
    for dtype, found in entrants.items():
        for name, kernel in found.kernels.items():
            findings.say(f"{source.shape} {dtype}: {name} loads the experts")
            for expert, weights in enumerate(source.experts()):
                kernel.load(0, expert, weights)


def _needed_bytes(
    shape: Shape, compute: torch.dtype, entrants: Mapping[str, Entrants], plan: Plan
) -> int:
    """Memory for the weights of all kernels and of transformers, and for the calls."""
    held = [stored_bytes(shape, dtype) for dtype, found in entrants.items() for _ in found.kernels]
    weights = shape.num_experts * (sum(held) + shape.expert_size * compute.itemsize)
    pairs = max(plan.tokens) * shape.top_k
    # Each kernel keeps scratch space for the token-expert pairs, float32 at worst.
    scratch = len(held) * pairs * (shape.hidden + shape.intermediate) * 4
    # transformers holds per pair: input, gate and up, their product, output with and without the score.
    theirs = pairs * (4 * shape.hidden + 3 * shape.intermediate) * compute.itemsize
    copied = (copied_bytes(shape, compute, tokens) for tokens in plan.tokens)
    return (
        weights + scratch + max([theirs, *(size for size in copied if size <= MOST_COPIED_BYTES)])
    )
