"""The roofline of a layer call, and the place's speeds that set it, measured throughout a run.

On a shared machine the speeds change from minute to minute. A kernel is compared with the speeds right before
and right after its call. Each speed is the best of several ways: a slow one would flatter every kernel.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any, Literal, NamedTuple

import torch

from eaas_cli.bench.command import figure
from eaas_cli.bench.experts.places import Cpu, Way
from eaas_cli.bench.experts.plan import FORMATS, Shape

__all__ = ["Gauge", "Limit", "Limits", "Speed", "limit", "stored_bytes"]

_TRIES = 9
_FIRST_MULTIPLY_S = 0.1


class Speed(NamedTuple):
    """Speed of the machine at one moment: bytes/s from memory, FLOP/s of a matrix product."""

    read: float
    multiply: float


class Limit(NamedTuple):
    """Lower bounds of the time of one layer call, in seconds: to read the weights, and to multiply."""

    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        """The larger of the two bounds: no call of the layer can be faster."""
        return max(self)

    @property
    def bound(self) -> Literal["memory", "compute"]:
        """The resource that sets the larger bound, for column `bound` of the report."""
        return "memory" if self.memory_s >= self.compute_s else "compute"


def stored_bytes(shape: Shape, dtype: str) -> int:
    """Stored bytes of one expert, with scales, without padding: what a call reads of each active expert."""
    if dtype not in FORMATS:
        return shape.expert_size * int(getattr(torch, dtype).itemsize)
    matrices = (2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
    return sum(FORMATS[dtype].nbytes(*each) for each in matrices)


def limit(shape: Shape, dtype: str, tokens: int, active: float, speed: Speed) -> Limit:
    """Compute the roofline of one layer call. Activations are not counted.

    Args:
        tokens: T; each goes to `top_k` experts.
        active: Experts with at least one token.
        speed: Speed of the machine.
    """
    flops = 2 * shape.expert_size * tokens * shape.top_k
    return Limit(active * stored_bytes(shape, dtype) / speed.read, flops / speed.multiply)


class Gauge:
    """Measures one speed of the place, by the fastest of several ways.

    Attributes:
        way: Name of the fastest way, which is used.
        samples: Bytes/s or FLOP/s of each measurement.
    """

    def __init__(self, place: Cpu, ways: Mapping[str, Way], first_s: float = 0.0) -> None:
        self._place = place
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(_TRIES):
            for name, way in ways.items():
                place.settle()
                seconds[name].append(place.timed(way.call)[0])
        self.way = max(ways, key=lambda name: ways[name].amount / median(seconds[name]))
        self._used = ways[self.way]
        self.samples: list[float] = []
        self.measure(first_s)

    @classmethod
    def of_reads(cls, place: Cpu) -> Gauge:
        """Measure reads from memory, in bytes/s. A measurement leaves the caches cold."""
        return cls(place, place.ways_to_read())

    @classmethod
    def of_products(cls, place: Cpu, dtype: torch.dtype) -> Gauge:
        """Measure matrix products of a dtype, in FLOP/s."""
        return cls(place, place.ways_to_multiply(dtype), _FIRST_MULTIPLY_S)

    def measure(self, seconds: float = 0.0) -> float:
        """Measure the speed now, with one call that starts at rest, or for at least `seconds`; keep it."""
        if not seconds:
            self._place.settle()
        done, took, started = 0, 0.0, time.perf_counter()
        while not done or time.perf_counter() - started < seconds:
            took += self._place.timed(self._used.call)[0]
            done += 1
        self.samples.append(done * self._used.amount / took)
        return self.samples[-1]

    def document(self, unit: float) -> dict[str, Any]:
        """Summarise all measurements of the run, for the document."""
        return {
            "median": figure(median(self.samples) / unit),
            "least": figure(min(self.samples) / unit),
            "most": figure(max(self.samples) / unit),
            "measurements": len(self.samples),
            "way": self.way,
        }


class Limits(NamedTuple):
    """The place's read and multiply gauges for one dtype of products."""

    dtype: torch.dtype
    read: Gauge
    multiply: Gauge

    def typical(self) -> Speed:
        """Median of the speeds measured so far, to predict whether reads or products limit a batch size."""
        return Speed(median(self.read.samples), median(self.multiply.samples))

    def measure(self, multiply_s: float) -> Speed:
        """Measure the read and multiply speeds now; the caches are cold afterwards.

        `multiply_s`: seconds of products; 0: use the median so far.
        """
        samples = self.multiply.samples
        multiply = self.multiply.measure(multiply_s) if multiply_s else median(samples)
        return Speed(self.read.measure(), multiply)
