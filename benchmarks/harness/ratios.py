"""Turns of measured calls, and the medians of their times and differences.

Compared things take turns, round after round. A figure is the median over the rounds; a ratio or a difference
is the median over the ratios of each round, so that a slow minute of the machine meets both sides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from eaas_cli.bench.command import figure

__all__ = ["Turn", "over", "summary", "take_turn"]

_LEAST_CALLS = 20
# Uncounted calls at the start of a turn: caches are cold and the peer sleeps after a pause.
_WARM_CALLS = 5


@dataclass(frozen=True)
class Turn:
    """Statistics of the calls in one turn.

    Attributes:
        p50_us, p99_us: Percentiles over all calls, microseconds.
    """

    p50_us: float
    p99_us: float
    calls: int

    @classmethod
    def of(cls, took_ns: Sequence[int]) -> Turn:
        """Compute the statistics from the calls' times in nanoseconds."""
        p50, p99 = np.percentile(np.asarray(took_ns, dtype=np.float64) / 1e3, (50, 99))
        return cls(float(p50), float(p99), len(took_ns))


def take_turn(call: Callable[[], object], seconds: float, *, pause_s: float = 0.0) -> Turn:
    """Call the measured function for at least `seconds` and 20 times, after a few calls that do not count.

    Args:
        pause_s: Sleep before each call.
    """
    for _ in range(_WARM_CALLS):
        call()
    took: list[int] = []
    end = time.perf_counter_ns() + int(seconds * 1e9)
    while True:
        if pause_s:
            time.sleep(pause_s)
        before = time.perf_counter_ns()
        call()
        after = time.perf_counter_ns()
        took.append(after - before)
        if after >= end and len(took) >= _LEAST_CALLS:
            return Turn.of(took)


def summary(turns: Sequence[Turn]) -> dict[str, float]:
    """Medians of p50 and p99 over the turns, for the document."""
    return {
        "p50": figure(median(turn.p50_us for turn in turns)),
        "p99": figure(median(turn.p99_us for turn in turns)),
    }


def over(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the rounds' differences."""
    return figure(median(a - b for a, b in zip(ours, theirs, strict=True)))
