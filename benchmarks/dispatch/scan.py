"""Cost of a scan of many flags that finds none."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from eaas.wire import Arena, SlotState
from eaas.wire.slot import DOORBELL
from eaas_cli.bench.figures import figure

__all__ = ["bench_scan"]

_CALLS = 200
_SLOT_BYTES = 64
_MASK = SlotState.WRITTEN.mask


def bench_scan(slots: int, rounds: int) -> tuple[float, float]:
    """Microseconds of `Flags.scan` and of a `Flags.wait` that does not wait, with the call from Python.

    The flags are in this core's caches, as for a spinning loop. Medians over the rounds.
    """
    arena = Arena.create_local(slots, _SLOT_BYTES, _SLOT_BYTES, 1)
    flags = arena.flags
    scans, looks = [], []
    try:
        for _ in range(rounds):
            scans.append(_each_us(lambda: flags.scan(0, slots, _MASK)))
            # No spinning, no waiting.
            looks.append(_each_us(lambda: flags.wait(0, slots, _MASK, DOORBELL, -1, 0, 0)))
    finally:
        arena.close()
    return figure(median(scans)), figure(median(looks))


def _each_us(look: Callable[[], object]) -> float:
    started = time.perf_counter_ns()
    for _ in range(_CALLS):
        look()
    return (time.perf_counter_ns() - started) / _CALLS / 1e3
