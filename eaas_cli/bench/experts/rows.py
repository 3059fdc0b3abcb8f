"""Rows of the document, with medians over the rounds, and the record of skipped combinations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from eaas_cli.bench.experts.measure import Sample
from eaas_cli.bench.experts.plan import AUTO, Shape
from eaas_cli.bench.experts.roofline import Speed, limit
from eaas_cli.bench.figures import figure

__all__ = ["Cell", "Findings", "auto_row", "kernel_row"]

Row = dict[str, Any]


@dataclass
class Findings:
    """The results of a run so far, as parts of its document.

    Attributes:
        rows: One per shape, dtype, number of tokens and kernel.
        auto: Choices of `auto` for each shape and dtype, with the candidates.
        skipped: Combinations that were not measured, and why.
    """

    say: Callable[[str], None]
    rows: list[dict[str, Any]] = field(default_factory=list)
    auto: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)

    def skip(
        self, shape: Shape, dtype: str, what: str, reason: str, tokens: int | None = None
    ) -> None:
        """Record a skipped combination; the report lists it, and the run continues.

        Args:
            what: A kernel or an implementation of transformers.
            reason: Why it is skipped.
            tokens: Batch size, if only this one is skipped.
        """
        entry = {"shape": str(shape), "dtype": dtype, "what": what, "reason": reason}
        self.skipped.append(entry if tokens is None else entry | {"tokens": tokens})


@dataclass(frozen=True)
class Cell:
    """The measurements of one batch size of a layer that all kernels' rows share.

    Attributes:
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
    """Make the document's row for one kernel at one batch size.

    Args:
        cell: The cell; its baselines have as many samples.
        kernel: Name of the kernel.
        samples: One per round.
        rel_error: Relative error of the answer.
    """
    seconds = [sample.seconds for sample in samples]
    limits = [
        limit(cell.shape, dtype, cell.tokens, sample.active, sample.speed) for sample in samples
    ]
    fractions = [least.seconds / took for least, took in zip(limits, seconds, strict=True)]
    return {
        "shape": str(cell.shape),
        **({"name": cell.shape.name} if cell.shape.name else {}),
        "dtype": dtype,
        "tokens": cell.tokens,
        "kernel": kernel,
        "ms": figure(1e3 * median(seconds)),
        "ms_spread": [figure(1e3 * value) for value in (min(seconds), max(seconds))],
        "tokens_per_s": figure(cell.tokens / median(seconds)),
        "roofline_fraction": figure(median(fractions)),
        "roofline_spread": [figure(value) for value in (min(fractions), max(fractions))],
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
    """Make the row of `auto`, a copy of the row of the kernel that it picked."""
    return row | {"kernel": AUTO, "picked": row["kernel"]}


def _ratios(theirs: Sequence[Sample], ours: Sequence[Sample]) -> list[float]:
    return [their.seconds / our.seconds for their, our in zip(theirs, ours, strict=True)]
