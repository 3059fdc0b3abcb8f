"""One MoE layer: its weights in memory once for each kernel and once for transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack

import torch

from eaas.bench.experts.cell import EXACT_TOKENS, MOST_COPIED_BYTES, bench_cell, copied_bytes
from eaas.bench.experts.entrants import Entrants, find_entrants
from eaas.bench.experts.findings import Findings
from eaas.bench.experts.limits import Limits
from eaas.bench.experts.plan import Plan, Shape
from eaas.bench.experts.roofline import stored_bytes
from eaas.bench.experts.source import Batches, Source, source_form
from eaas.bench.machine import available_bytes

__all__ = ["bench_layer"]


def bench_layer(
    shape: Shape, dtypes: Iterable[str], plan: Plan, limits: Limits, findings: Findings
) -> None:
    """Add a layer's rows. All memory is given back.

    Args:
        shape: Of the layer.
        dtypes: Of the weights as they are stored; those with the same dtype of the products, which are
            measured in the same rounds.
        plan: Of the run.
        limits: The machine's, for that dtype of the products.
        findings: Where the results go.
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
            findings.say(f"{source.shape} {dtype}: {name} takes the experts over")
            for expert, weights in enumerate(source.experts()):
                kernel.load(0, expert, weights)


def _needed_bytes(
    shape: Shape, compute: torch.dtype, entrants: Mapping[str, Entrants], plan: Plan
) -> int:
    """Weights of all kernels and of transformers, and what the calls take beside them."""
    held = [stored_bytes(shape, dtype) for dtype, found in entrants.items() for _ in found.kernels]
    weights = shape.num_experts * (sum(held) + shape.expert_size * compute.itemsize)
    pairs = max(plan.tokens) * shape.top_k
    # Each kernel keeps room for the pairs of token and expert, in float32 at worst.
    scratch = len(held) * pairs * (shape.hidden + shape.intermediate) * 4
    # transformers has, for each pair: input, gate and up, their product, output with and without the score.
    theirs = pairs * (4 * shape.hidden + 3 * shape.intermediate) * compute.itemsize
    copied = (copied_bytes(shape, compute, tokens) for tokens in plan.tokens)
    return (
        weights + scratch + max([theirs, *(size for size in copied if size <= MOST_COPIED_BYTES)])
    )
