"""Times implementations in turn, each call between two measurements of the machine's speed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from eaas_cli.bench.experts.limits import Limits
from eaas_cli.bench.experts.place import Compute, Place
from eaas_cli.bench.experts.roofline import Speed
from eaas_cli.bench.experts.source import Batch

__all__ = ["Sample", "affordable_rounds", "in_turn"]

_Name = TypeVar("_Name")

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


def in_turn(
    place: Place,
    computes: Mapping[_Name, Compute],
    batches: Iterable[Batch],
    limits: Limits,
    *,
    multiply_s: float,
) -> dict[_Name, list[Sample]]:
    """Run one round per batch: every implementation once, in rotating order.

    Args:
        place: Times the calls.
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
            place.settle()
            seconds, _ = place.timed(partial(computes[name], batch))
            after = limits.measure(multiply_s)
            # Use the mean. When the speed varies, even the reader itself stays below the maximum.
            speed = Speed((before.read + after.read) / 2, (before.multiply + after.multiply) / 2)
            samples[name].append(Sample(seconds, speed, batch.active))
            before = after
    return samples


def affordable_rounds(wanted: int, round_s: float, budget_s: float) -> int:
    """Number of rounds of `round_s` that fit `budget_s`; three if fewer fit, but at most `wanted`."""
    return min(wanted, max(_LEAST_ROUNDS, int(budget_s / round_s)))
