"""Implementations in turn, each call between two measurements of what the machine gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from eaas.bench.experts.limits import settle
from eaas.bench.experts.roofline import Speed
from eaas.bench.experts.source import Batch

__all__ = ["Compute", "Sample", "SpeedMeter", "affordable_rounds", "in_turn", "timed"]

_Name = TypeVar("_Name")
Compute = Callable[[Batch], torch.Tensor]

# Below three there is no median to speak of.
_LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Sample:
    """One call.

    Attributes:
        seconds: That it took.
        speed: The machine's, mean of right before and right after.
        active: Experts that it needed.
    """

    seconds: float
    speed: Speed
    active: int


class SpeedMeter(Protocol):
    """Measures the machine; `Limits`."""

    def measure(self, multiply_s: float) -> Speed:
        """What it gives right now; the caches are cold afterwards."""
        ...


def timed(compute: Compute, batch: Batch) -> tuple[float, torch.Tensor]:
    """Seconds, and the answer."""
    started = time.perf_counter()
    answer_TH = compute(batch)
    return time.perf_counter() - started, answer_TH


def in_turn(
    computes: Mapping[_Name, Compute],
    batches: Iterable[Batch],
    meter: SpeedMeter,
    *,
    multiply_s: float,
) -> dict[_Name, list[Sample]]:
    """A round for each batch: every implementation once, each round begun by another one.

    Args:
        computes: Name -> implementation.
        batches: All implementations get the same one in a round.
        meter: Called before and after each call.
        multiply_s: How long the meter multiplies; 0 where that speed matters to none of these calls.

    Returns:
        Name -> a sample for each batch, in their order.
    """
    names = list(computes)
    samples: dict[_Name, list[Sample]] = {name: [] for name in names}
    before = meter.measure(multiply_s)
    for number, batch in enumerate(batches):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            settle()
            seconds, _ = timed(computes[name], batch)
            after = meter.measure(multiply_s)
            # The mean: the larger of the two would be too strict wherever the machine's speed sways.
            # Tried with the reader itself as the implementation.
            speed = Speed((before.read + after.read) / 2, (before.multiply + after.multiply) / 2)
            samples[name].append(Sample(seconds, speed, batch.active))
            before = after
    return samples


def affordable_rounds(wanted: int, round_s: float, budget_s: float) -> int:
    """As many as wanted, or what fits the budget, but three if that many are wanted.

    Args:
        wanted: Rounds asked for.
        round_s: What one takes.
        budget_s: Seconds for all.
    """
    return min(wanted, max(_LEAST_ROUNDS, int(budget_s / round_s)))
