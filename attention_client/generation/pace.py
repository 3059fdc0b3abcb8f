"""Probe of the machine's current speed, for recordings: the engine's thread times a fixed computation.

The speed of a shared machine varies by a factor of two within seconds. The times of the engine's steps depend
on the machine and on the batch; the time of a fixed computation depends on the machine alone.
"""

from __future__ import annotations

import time

import numpy as np

__all__ = ["PaceProbe"]

# About 0.5 ms: half interpreter, half vector instructions, as in an engine's step. Once in 0.1 s, so that it
# costs less than 1 %.
_LOOPS, _PRODUCTS, _SIDE = 4000, 40, 96
_EVERY_S = 0.1


class PaceProbe:
    """Times a fixed computation, at most every 0.1 s, beside the step times of a recording."""

    def __init__(self) -> None:
        self._matrix = np.random.default_rng(0).standard_normal((_SIDE, _SIDE), dtype=np.float32)
        self._due_s = 0.0

    def seconds(self) -> float | None:
        """Run the computation and return its time, for the recording; None: too early for another run."""
        begin = time.perf_counter()
        if begin < self._due_s:
            return None
        self._due_s = begin + _EVERY_S
        total = 0
        for number in range(_LOOPS):
            total += number & total
        row = self._matrix[0]
        for _ in range(_PRODUCTS):
            row = self._matrix @ row * 0.01
        return time.perf_counter() - begin
