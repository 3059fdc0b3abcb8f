"""Rows of the document: medians over the rounds of a cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from eaas_cli.bench.command import figure
from eaas_cli.bench.experts.limits import Speed, limit
from eaas_cli.bench.experts.plan import Shape

__all__ = ["Sample", "kernel_row"]


class Sample(NamedTuple):
    """One timed call of an implementation: of an expert kernel, or of transformers'.

    Attributes:
        speed: Speed of the machine, the mean of the measurements before and after the call.
        active: Number of experts with tokens in its batch.
    """

    seconds: float
    speed: Speed
    active: int


def kernel_row(
    shape: Shape,
    tokens: int,
    dtype: str,
    kernel: str,
    samples: Sequence[Sample],
    baselines: Mapping[str, Sequence[Sample] | None],
    bound: str,
    rel_error: float,
) -> dict[str, Any]:
    """Make the document's row for one kernel at one batch size.

    Args:
        tokens: T.
        kernel: Name of the kernel.
        samples: One per round.
        baselines: transformers' implementation -> as many samples; None: skipped.
        bound: What limits the cell, which is the same in all of its rows.
        rel_error: Relative error of the answer.
    """
    seconds = [sample.seconds for sample in samples]
    limits = [limit(shape, dtype, tokens, s.active, s.speed) for s in samples]
    fractions = [least.seconds / took for least, took in zip(limits, seconds, strict=True)]
    theirs = {
        name: None if of is None else [sample.seconds for sample in of]
        for name, of in baselines.items()
    }
    return {
        "shape": str(shape),
        "dtype": dtype,
        "tokens": tokens,
        "kernel": kernel,
        "ms": figure(1e3 * median(seconds)),
        "ms_spread": [figure(1e3 * value) for value in (min(seconds), max(seconds))],
        "roofline_fraction": figure(median(fractions)),
        "roofline_spread": [figure(value) for value in (min(fractions), max(fractions))],
        "bound": bound,
        "speedup": {
            name: of and figure(median(their / our for their, our in zip(of, seconds, strict=True)))
            for name, of in theirs.items()
        },
        "rel_error": float(f"{rel_error:.3g}"),
        "rounds": len(samples),
    }
