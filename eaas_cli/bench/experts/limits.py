"""The place's speed of memory reads and of matrix products, measured throughout a run.

On a shared machine both change from minute to minute. A kernel is compared with the speeds right before and
right after its call. Each limit is the best of several ways, because a slow one would flatter every kernel.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median

import torch

from eaas_cli.bench.experts.place import Place, Way
from eaas_cli.bench.experts.roofline import Speed

__all__ = ["Limits", "MultiplyLimit", "ReadLimit"]

_TRIES = 9


class ReadLimit:
    """Measures the speed of reads from memory. A measurement leaves the caches cold.

    Attributes:
        way: The fastest way, which is used.
        samples: Bytes/s of each read.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        ways = place.ways_to_read()
        self.way = _fastest(place, ways)
        self._read = ways[self.way]
        self.samples: list[float] = []
        self.measure()

    def measure(self) -> float:
        """Measure the read speed now, in bytes/s; keep it in `samples`."""
        self._place.settle()
        self.samples.append(self._read.amount / self._place.timed(self._read.call)[0])
        return self.samples[-1]


class MultiplyLimit:
    """Measures the speed of a matrix product.

    Attributes:
        way: The fastest way, which is used.
        samples: FLOP/s of each measurement.
    """

    def __init__(self, place: Place, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._place = place
        ways = place.ways_to_multiply(dtype)
        self.way = _fastest(place, ways)
        self._multiply = ways[self.way]
        self.samples: list[float] = []
        self.measure(0.1)

    def measure(self, seconds: float) -> float:
        """Measure the speed of products now, in FLOP/s, for at least `seconds`; keep it in `samples`."""
        done, took, started = 0, 0.0, time.perf_counter()
        while time.perf_counter() - started < seconds:
            took += self._place.timed(self._multiply.call)[0]
            done += 1
        self.samples.append(done * self._multiply.amount / took)
        return self.samples[-1]


class Limits:
    """The place's read and multiply limits for one dtype of products."""

    def __init__(self, read: ReadLimit, multiply: MultiplyLimit) -> None:
        self.dtype = multiply.dtype
        self.compute = str(self.dtype).removeprefix("torch.")
        self._read, self._multiply = read, multiply

    def typical(self) -> Speed:
        """Median of the speeds measured so far, to predict whether reads or products limit a batch size."""
        return Speed(median(self._read.samples), median(self._multiply.samples))

    def measure(self, multiply_s: float) -> Speed:
        """Measure the read and multiply speeds now; the caches are cold afterwards.

        `multiply_s`: seconds of products; 0: use the median so far.
        """
        samples = self._multiply.samples
        multiply = self._multiply.measure(multiply_s) if multiply_s else median(samples)
        return Speed(self._read.measure(), multiply)


def _fastest(place: Place, ways: Mapping[str, Way]) -> str:
    """Time every way; return the name of the one with the best median speed, which the run then uses."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_TRIES):
        for name, way in ways.items():
            place.settle()
            seconds[name].append(place.timed(way.call)[0])
    return max(ways, key=lambda name: ways[name].amount / median(seconds[name]))
