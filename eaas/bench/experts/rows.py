"""Rows of the document: medians over the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from eaas.bench.experts.measure import Sample
from eaas.bench.experts.plan import AUTO, Shape
from eaas.bench.experts.roofline import Limit, Speed, limit

__all__ = ["Cell", "auto_row", "kernel_row", "spread"]

Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """What was the same for all implementations of some rows.

    Attributes:
        shape: Of the layer.
        tokens: T.
        baselines: transformers' implementation -> its samples, or None where it was skipped.
        typical: The machine's speed, median over all that was measured in the cell.
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
    """One kernel's row.

    Args:
        cell: Where it was measured; its baselines have as many samples.
        dtype: Of its weights as they are stored.
        kernel: Its name.
        samples: One for each round.
        rel_error: Of its answer.
    """
    seconds = [sample.seconds for sample in samples]
    limits = [_limit(cell, dtype, sample) for sample in samples]
    fractions = [least.seconds / took for least, took in zip(limits, seconds, strict=True)]
    return {
        **_shape(cell.shape),
        "dtype": dtype,
        "tokens": cell.tokens,
        "kernel": kernel,
        "ms": _figure(1e3 * median(seconds)),
        "ms_spread": [_figure(1e3 * value) for value in spread(seconds)],
        "tokens_per_s": _figure(cell.tokens / median(seconds)),
        "roofline_fraction": _figure(median(fractions)),
        "roofline_spread": [_figure(value) for value in spread(fractions)],
        "roofline_ms": _figure(1e3 * median(least.seconds for least in limits)),
        "bound": limit(cell.shape, dtype, cell.tokens, cell.active, cell.typical).bound,
        "speedup": {
            name: theirs and _figure(median(_ratios(theirs, samples)))
            for name, theirs in cell.baselines.items()
        },
        "baseline_ms": {
            name: theirs and _figure(1e3 * median(sample.seconds for sample in theirs))
            for name, theirs in cell.baselines.items()
        },
        "rel_error": float(f"{rel_error:.3g}"),
        "rounds": len(samples),
    }


def auto_row(row: Row) -> Row:
    """The row of `auto`, which is the one of the kernel that it picked."""
    return row | {"kernel": AUTO, "picked": row["kernel"]}


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Least and largest."""
    return min(values), max(values)


def _limit(cell: Cell, dtype: str, sample: Sample) -> Limit:
    return limit(cell.shape, dtype, cell.tokens, sample.active, sample.speed)


def _ratios(theirs: Sequence[Sample], ours: Sequence[Sample]) -> list[float]:
    return [their.seconds / our.seconds for their, our in zip(theirs, ours, strict=True)]


def _shape(shape: Shape) -> Row:
    return {"shape": str(shape)} | ({"name": shape.name} if shape.name else {})


def _figure(value: float) -> float:
    """Four digits: more would pretend."""
    return float(f"{value:.4g}")
