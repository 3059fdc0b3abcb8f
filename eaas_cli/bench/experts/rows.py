"""Rows of the document: medians over the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from eaas_cli.bench.experts.measure import Sample
from eaas_cli.bench.experts.plan import AUTO, Shape
from eaas_cli.bench.experts.roofline import Limit, Speed, limit
from eaas_cli.bench.figures import figure

__all__ = ["Cell", "auto_row", "kernel_row", "spread"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """A batch size of a layer: common to all implementations.

    Attributes:
        shape: Shape of the layer.
        tokens: T.
        baselines: transformers' implementation -> samples; None: skipped.
        typical: Median speed of the machine in the cell.
        active: Experts with tokens, median over the rounds.
    """

    shape: Shape
    tokens: int
    baselines: Mapping[str, Sequence[Sample] | None]
    typical: Speed
    active: float


def kernel_row(
    cell: Cell, dtype: str, kernel: str, samples: Sequence[Sample], rel_error: float
) -> Row:
    """Make the row of one kernel.

    Args:
        cell: The cell; its baselines have as many samples.
        dtype: Dtype of the stored weights.
        kernel: Name of the kernel.
        samples: One per round.
        rel_error: Relative error of the answer.
    """
    seconds = [sample.seconds for sample in samples]
    limits = [_limit(cell, dtype, sample) for sample in samples]
    fractions = [least.seconds / took for least, took in zip(limits, seconds, strict=True)]
    return {
        **_shape(cell.shape),
        "dtype": dtype,
        "tokens": cell.tokens,
        "kernel": kernel,
        "ms": figure(1e3 * median(seconds)),
        "ms_spread": [figure(1e3 * value) for value in spread(seconds)],
        "tokens_per_s": figure(cell.tokens / median(seconds)),
        "roofline_fraction": figure(median(fractions)),
        "roofline_spread": [figure(value) for value in spread(fractions)],
        "roofline_ms": figure(1e3 * median(least.seconds for least in limits)),
        "bound": limit(cell.shape, dtype, cell.tokens, cell.active, cell.typical).bound,
        "speedup": {
            name: theirs and figure(median(_ratios(theirs, samples)))
            for name, theirs in cell.baselines.items()
        },
        "baseline_ms": {
            name: theirs and figure(1e3 * median(sample.seconds for sample in theirs))
            for name, theirs in cell.baselines.items()
        },
        "rel_error": float(f"{rel_error:.3g}"),
        "rounds": len(samples),
    }


def auto_row(row: Row) -> Row:
    """The row of `auto`: that of the kernel that it picked."""
    return row | {"kernel": AUTO, "picked": row["kernel"]}


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Minimum and maximum."""
    return min(values), max(values)


def _limit(cell: Cell, dtype: str, sample: Sample) -> Limit:
    return limit(cell.shape, dtype, cell.tokens, sample.active, sample.speed)


def _ratios(theirs: Sequence[Sample], ours: Sequence[Sample]) -> list[float]:
    return [their.seconds / our.seconds for their, our in zip(theirs, ours, strict=True)]


def _shape(shape: Shape) -> Row:
    return {"shape": str(shape)} | ({"name": shape.name} if shape.name else {})
