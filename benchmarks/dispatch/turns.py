"""Turns: a measured function called one time after another for a while, and the statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from eaas_cli.bench.figures import figure

__all__ = ["LEAST_CALLS", "WARM_CALLS", "Turn", "summary", "take_turn"]

LEAST_CALLS = 20
# Uncounted calls at the start of a turn: caches are cold and the peer sleeps after a pause.
WARM_CALLS = 5


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


def take_turn(
    call: Callable[[], object],
    seconds: float,
    *,
    least: int = LEAST_CALLS,
    pause_s: float = 0.0,
) -> list[int]:
    """Call the measured function for at least `seconds` and at least `least` times.

    Args:
        pause_s: Sleep before each call.

    Returns:
        Nanoseconds of each call, without the first WARM_CALLS.
    """
    for _ in range(WARM_CALLS):
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
        if after >= end and len(took) >= least:
            return took


def summary(turns: Sequence[Turn]) -> dict[str, float]:
    """Medians of p50 and p99 over the turns, for the document."""
    return {
        "p50": figure(median(turn.p50_us for turn in turns)),
        "p99": figure(median(turn.p99_us for turn in turns)),
    }
