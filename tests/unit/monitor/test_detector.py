"""Leases, learned suspicion, and the self-isolation check."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.failure_detection.detector import PHI, WINDOW, Detector

LEASE_S, HEARTBEAT_S = 2.0, 0.9
TICK_S = LEASE_S / 8


def detector(**more: float) -> Detector:
    return Detector(LEASE_S, HEARTBEAT_S, 0.0, **more)


def phi(silence_s: float, intervals: list[float]) -> float:
    """phi as in the paper: -log10 of the normal distribution's tail."""
    deviations = (silence_s - fmean(intervals)) / max(pstdev(intervals), 0.05 * LEASE_S)
    return -math.log10(0.5 * math.erfc(deviations / math.sqrt(2)))


@given(st.lists(st.floats(HEARTBEAT_S, 0.99 * LEASE_S), min_size=16, max_size=3 * WINDOW))
def test_a_member_is_late_at_its_phi(intervals: list[float]) -> None:
    watch = detector()
    arrivals = watch.watch("a", 0.0)
    now = 0.0
    for interval_s in intervals:
        now += interval_s
        watch.heard("a", now)
    assert phi(arrivals.patience_s, intervals[-WINDOW:]) == pytest.approx(PHI, abs=0.01)


@pytest.mark.parametrize(
    ("intervals", "mean_s", "deviation_s"),
    [
        ([HEARTBEAT_S] * 40, HEARTBEAT_S, 0.1),
        # An early heartbeat does not make the next one due sooner.
        ([0.01, HEARTBEAT_S] * 50, HEARTBEAT_S, 0.1),
        # An interval beyond a lease is no jitter.
        ([HEARTBEAT_S] * 20 + [60.0] + [HEARTBEAT_S] * 20, HEARTBEAT_S, 0.1),
        ([HEARTBEAT_S, HEARTBEAT_S + 0.4] * 20, HEARTBEAT_S + 0.2, 0.2),
    ],
)
def test_patience_follows_the_jitter(
    intervals: list[float], mean_s: float, deviation_s: float
) -> None:
    watch = detector()
    arrivals = watch.watch("a", 0.0)
    now = 0.0
    for interval_s in intervals:
        now += interval_s
        watch.heard("a", now)
    assert arrivals.patience_s == pytest.approx(mean_s + 5.61 * deviation_s, abs=0.01)


def ticks(watch: Detector, start: float, end: float) -> list[tuple[float, tuple[str, ...]]]:
    """Tick until `end`; returns when each member lapsed."""
    lapsed = []
    for step in range(round((end - start) / TICK_S)):
        now = start + (step + 1) * TICK_S
        if gone := watch.tick(now).lapsed:
            lapsed.append((now - start, gone))
            for member_id in gone:
                watch.forget(member_id)
    return lapsed


def known(watch: Detector, *names: str) -> float:
    """Watch members with known intervals, last heard at these times."""
    for name in names:
        watch.watch(name, 0.0)
    now = 0.0
    for _ in range(40):
        now += HEARTBEAT_S
        watch.tick(now - HEARTBEAT_S / 2)
        watch.tick(now)
        for name in names:
            watch.heard(name, now)
    return now


def test_two_members_are_too_few_for_the_isolation_check() -> None:
    """The monitor itself is no third one."""
    watch = detector()
    now = known(watch, "a", "b")
    watch.watch("monitor", now, remote=False)
    assert ticks(watch, now, now + 2.0) == [(2.0, ("a", "b", "monitor"))]


def test_three_that_fall_silent_together_are_held_for_one_lease_and_no_longer() -> None:
    watch = detector()
    assert watch.due_at() == math.inf
    watch.watch("left", 0.0)
    watch.forget("left")
    watch.forget("left")
    assert (watch.due_at(), watch.tick(0.0).lapsed) == (math.inf, ())
    now = known(watch, "a", "b", "c")
    assert ticks(watch, now, now + 3.75) == []
    assert watch.hold_reason is not None
    assert "for 2 s" in watch.hold_reason
    assert watch.due_at() == pytest.approx(now + 4.0)
    assert watch.tick(now + 4.0).lapsed == ("a", "b", "c")
    assert watch.hold_reason is None


def test_a_silent_minority_is_not_held() -> None:
    watch = detector()
    now = known(watch, "a", "b", "c", "d")
    lapsed = []
    for step in range(12):
        at = now + (step + 1) * TICK_S
        for well in "cd":
            watch.heard(well, at)
        lapsed += [(at - now, watch.tick(at).lapsed)]
    assert (2.0, ("a", "b")) in lapsed
    assert watch.hold_reason is None
