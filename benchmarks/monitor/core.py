"""The registry alone: the cost of a heartbeat without gRPC."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.monitor.member import describe
from eaas.types import MemberState
from eaas_cli.bench.figures import figure
from monitor.registry import Registry

__all__ = ["bench_registry"]

_INTERVAL_S, _LEASE_S = 1.0, 2.5
# Enough to fill each member's window of intervals.
_ROUNDS, _LAST = 70, 5


def bench_registry(members: int) -> dict[str, Any]:
    """Measure the processor time of a heartbeat and of a tick."""
    now = 0.0
    registry = Registry(_LEASE_S, _INTERVAL_S, now)
    ids = [describe(number).id for number in range(members)]
    for number in range(members):
        registry.register(describe(number), 0, now)
    beat_s: list[float] = []
    tick_s: list[float] = []
    for turn in range(_ROUNDS):
        now += _INTERVAL_S
        began = time.thread_time()
        for name in ids:
            registry.heartbeat(name, 1, now, state=MemberState.SERVING, progress=turn, in_flight=1)
        heard = time.thread_time()
        registry.tick(now)
        beat_s.append((heard - began) / members)
        tick_s.append(time.thread_time() - heard)
    return {
        "members": members,
        "heartbeat_us": figure(1e6 * min(beat_s[-_LAST:])),
        "tick_us": figure(1e6 * min(tick_s[-_LAST:])),
    }
