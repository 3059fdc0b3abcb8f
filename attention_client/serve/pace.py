"""How fast the machine is just now: a fixed computation, timed.

A machine that others use, too, is half as fast in one second as in another. What an engine's steps take says
that as well, but not whether it is the machine or the batch. This does: it is the same each time.
"""

from __future__ import annotations

import time

import numpy as np

__all__ = ["PaceProbe"]

# About half a millisecond, of which half is the interpreter's and half that of vector instructions, as of an
# engine's step; and how often, so that it takes less than a hundredth of the time.
_LOOPS, _PRODUCTS, _SIDE = 4000, 40, 96
_EVERY_S = 0.1


class PaceProbe:
    """Times the computation now and then."""

    def __init__(self) -> None:
        self._matrix = np.random.default_rng(0).standard_normal((_SIDE, _SIDE), dtype=np.float32)
        self._due_s = 0.0

    def seconds(self) -> float | None:
        """What the computation takes now; None where it is too early for another one."""
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
