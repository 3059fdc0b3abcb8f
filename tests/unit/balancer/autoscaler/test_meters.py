"""Running totals become rates between two readings."""

from __future__ import annotations

import pytest

from balancer.autoscaler.meters import LatencyMeter, Utilizations
from eaas.types import Member, MemberState, Role


def server(busy_s: float, silence_s: float = 0.0, incarnation: int = 1) -> Member:
    told = {"silence_s": silence_s, "busy_s": busy_s}
    role, state = Role.EXPERT_SERVER, MemberState.SERVING
    return Member("s", role, 1, "here", "here:1", state, incarnation, **told)


def test_utilization_is_of_the_time_between_two_heartbeats() -> None:
    meter = Utilizations()
    assert meter.read([server(100.0, 0.5)], 10.0) == {}
    # 6 s of work between the heartbeats of 9.5 and 19.5.
    assert meter.read([server(106.0, 0.5)], 20.0) == {"s": pytest.approx(0.6)}
    # A long batch that ended a moment ago.
    assert meter.read([server(117.0, 0.5)], 30.0) == {"s": 1.0}
    # Another incarnation counts anew.
    assert meter.read([server(3.0, incarnation=2)], 40.0) == {}
    assert meter.read([server(5.0, incarnation=2)], 50.0) == {"s": pytest.approx(0.2)}


def test_a_monitor_that_starts_again_does_not_make_servers_busy() -> None:
    meter = Utilizations()
    meter.read([server(500.0)], 10.0)
    # It has not heard of the server yet.
    assert meter.read([server(0.0, 1.0)], 20.0) == {}
    assert meter.read([server(510.0)], 30.0) == {"s": pytest.approx(0.5)}
    # A meter that began then waits for two readings of this process.
    late = Utilizations()
    late.read([server(0.0, 1.0)], 20.0)
    assert late.read([server(510.0)], 30.0) == {}
    assert late.read([server(512.0)], 40.0) == {"s": pytest.approx(0.2)}


def test_latency_is_a_mean_over_the_clients_tokens() -> None:
    meter = LatencyMeter()
    a, b = ("a", 1), ("b", 1)
    assert meter.read({a: (10.0, 100), b: (0.0, 0)}) is None
    assert meter.read({a: (11.0, 120), b: (6.0, 60)}) == pytest.approx(7 / 80)
    # Nothing came.
    assert meter.read({a: (11.0, 120), b: (6.0, 60)}) is None
    # One does not answer; then it is back, and there is no telling when its tokens came.
    assert meter.read({a: (12.0, 130)}) == pytest.approx(0.1)
    assert meter.read({a: (13.0, 140), b: (60.0, 70)}) == pytest.approx(0.1)
    # Another incarnation.
    assert meter.read({("a", 2): (1.0, 1), b: (61.0, 80)}) == pytest.approx(0.1)
