"""Times implementations in turn, each call between two measurements of the machine's speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from eaas_cli.bench.experts.limits import Limits, settle
from eaas_cli.bench.experts.roofline import Speed
from eaas_cli.bench.experts.source import Batch

__all__ = ["Compute", "Sample", "affordable_rounds", "in_turn", "timed"]

_Name = TypeVar("_Name")
Compute = Callable[[Batch], torch.Tensor]

# Fewest rounds of a cell, because a median needs three samples.
_LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Sample:
    """One timed call of an implementation: of an expert kernel, or of transformers'.

    Attributes:
        speed: Speed of the machine, the mean of the measurements before and after the call.
        active: Number of experts with tokens in its batch.
    """

    seconds: float
    speed: Speed
    active: int


def timed(compute: Compute, batch: Batch) -> tuple[float, torch.Tensor]:
    """Run an implementation on a batch once; return the seconds and the answer."""
    started = time.perf_counter()
    answer_TH = compute(batch)
    return time.perf_counter() - started, answer_TH


def in_turn(
    computes: Mapping[_Name, Compute],
    batches: Iterable[Batch],
    limits: Limits,
    *,
    multiply_s: float,
) -> dict[_Name, list[Sample]]:
    """Run one round per batch: every implementation once, in rotating order.

    Args:
        computes: Name -> implementation.
        batches: One per round, the same for all implementations.
        limits: Measured before and after each call.
        multiply_s: Seconds of products per measurement; 0 if their speed does not matter.

    Returns:
        Name -> one sample per batch.
    """
    names = list(computes)
    samples: dict[_Name, list[Sample]] = {name: [] for name in names}
    before = limits.measure(multiply_s)
    for number, batch in enumerate(batches):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            settle()
            seconds, _ = timed(computes[name], batch)
            after = limits.measure(multiply_s)
            # Use the mean. When the speed varies, even the reader itself stays below the maximum.
            speed = Speed((before.read + after.read) / 2, (before.multiply + after.multiply) / 2)
            samples[name].append(Sample(seconds, speed, batch.active))
            before = after
    return samples


def affordable_rounds(wanted: int, round_s: float, budget_s: float) -> int:
    """Number of rounds of `round_s` that fit `budget_s`; three if fewer fit, but at most `wanted`."""
    return min(wanted, max(_LEAST_ROUNDS, int(budget_s / round_s)))
