"""Turns: calls one after another for a while, and what is said of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

__all__ = ["LEAST_CALLS", "WARM_CALLS", "Turn", "figure", "summary", "take_turn"]

LEAST_CALLS = 20
# A process that slept meets cold caches, and its peer asleep.
WARM_CALLS = 5


@dataclass(frozen=True)
class Turn:
    """What the calls of a turn took.

    Attributes:
        p50_us, p99_us: Over all calls.
        calls: How many there were.
    """

    p50_us: float
    p99_us: float
    calls: int

    @classmethod
    def of(cls, took_ns: Sequence[int]) -> Turn:
        """From the calls' times."""
        p50, p99 = np.percentile(np.asarray(took_ns, dtype=np.float64) / 1e3, (50, 99))
        return cls(float(p50), float(p99), len(took_ns))


def take_turn(
    call: Callable[[], object],
    seconds: float,
    *,
    least: int = LEAST_CALLS,
    pause_s: float = 0.0,
) -> list[int]:
    """Call again and again.

    Args:
        call: What is measured.
        seconds: For so long, at least.
        least: So many calls, at least.
        pause_s: Sleep before each call.

    Returns:
        Nanoseconds of each call, but the first WARM_CALLS ones.
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
    """Medians over the turns, for the document."""
    return {
        "p50": figure(median(turn.p50_us for turn in turns)),
        "p99": figure(median(turn.p99_us for turn in turns)),
    }


def figure(value: float) -> float:
    """Four digits: more would pretend."""
    return float(f"{value:.4g}")
