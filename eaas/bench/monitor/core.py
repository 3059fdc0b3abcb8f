"""The registry alone: what a heartbeat costs without gRPC."""

from __future__ import annotations

import time
from typing import Any

from eaas.bench.dispatch.turns import figure
from eaas.bench.monitor.member import describe
from eaas.types import MemberState
from monitor.registry import Registry

__all__ = ["bench_registry"]

_INTERVAL_S, _LEASE_S = 1.0, 2.5
# So many that each member's estimate has as many intervals as it keeps.
_ROUNDS, _LAST = 70, 5


def bench_registry(members: int) -> dict[str, Any]:
    """Processor time of a heartbeat and of a tick, with so many members."""
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
