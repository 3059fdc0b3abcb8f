"""Leases, suspicion that learns, and doubt."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.detector import PHI, WINDOW, Detector

LEASE_S, HEARTBEAT_S = 2.0, 0.9
TICK_S = LEASE_S / 8


def detector(**more: float) -> Detector:
    return Detector(LEASE_S, HEARTBEAT_S, 0.0, **more)


def phi(silence_s: float, intervals: list[float]) -> float:
    """As the paper has it: -log10 of what is left of the normal distribution."""
    deviations = (silence_s - fmean(intervals)) / max(pstdev(intervals), 0.05 * LEASE_S)
    return -math.log10(0.5 * math.erfc(deviations / math.sqrt(2)))


@given(st.lists(st.floats(HEARTBEAT_S, 0.99 * LEASE_S), min_size=16, max_size=3 * WINDOW))
def test_a_member_is_late_where_phi_says_so(intervals: list[float]) -> None:
    watch = detector()
    arrivals = watch.watch("a", 0.0)
    now = 0.0
    for interval_s in intervals:
        now += interval_s
        watch.heard("a", now)
    assert phi(arrivals.patience_s, intervals[-WINDOW:]) == pytest.approx(PHI, abs=0.01)


def test_patience_is_three_quarters_of_a_lease_until_enough_is_known() -> None:
    watch = detector()
    arrivals = watch.watch("a", 0.0)
    for beat in range(1, 16):
        watch.heard("a", beat * 1.9)
        assert arrivals.patience_s == 1.5
    watch.heard("a", 16 * 1.9)
    assert arrivals.patience_s > 1.9


def test_who_is_punctual_is_suspected_sooner_than_who_is_not() -> None:
    watch = detector()
    calm, jittery = watch.watch("calm", 0.0), watch.watch("jittery", 0.0)
    for beat in range(1, 40):
        watch.heard("calm", beat * HEARTBEAT_S)
        watch.heard("jittery", beat * HEARTBEAT_S + 0.4 * (beat % 2))
    assert calm.patience_s == pytest.approx(0.9 + 5.61 * 0.1, abs=0.01)
    assert jittery.patience_s > calm.patience_s + 0.3


def test_an_early_heartbeat_does_not_make_the_next_one_due_sooner() -> None:
    watch = detector()
    arrivals = watch.watch("a", 0.0)
    now = 0.0
    for beat in range(100):
        now += 0.01 if beat % 2 else HEARTBEAT_S
        watch.heard("a", now)
    assert arrivals.patience_s == pytest.approx(0.9 + 5.61 * 0.1, abs=0.01)


def test_what_comes_after_more_than_a_lease_is_no_jitter() -> None:
    watch = detector()
    arrivals = watch.watch("a", 0.0)
    now = 0.0
    for beat in range(1, 40):
        now += 60.0 if beat == 30 else HEARTBEAT_S
        watch.heard("a", now)
    assert arrivals.patience_s < 1.5


def ticks(watch: Detector, start: float, end: float) -> list[tuple[float, tuple[str, ...]]]:
    """Ticks until `end`; when who lapsed."""
    lapsed = []
    for step in range(round((end - start) / TICK_S)):
        now = start + (step + 1) * TICK_S
        if gone := watch.tick(now).lapsed:
            lapsed.append((now - start, gone))
            for member_id in gone:
                watch.forget(member_id)
    return lapsed


def known(watch: Detector, *names: str) -> float:
    """These are known well; when they were last heard."""
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


def test_two_members_are_too_few_to_doubt_oneself() -> None:
    watch = detector()
    now = known(watch, "a", "b")
    assert ticks(watch, now, now + 5.0) == [(2.0, ("a", "b"))]


def test_the_monitor_itself_is_no_witness() -> None:
    watch = detector()
    now = known(watch, "a", "b")
    watch.watch("monitor", now, witness=False)
    assert ticks(watch, now, now + 2.0) == [(2.0, ("a", "b", "monitor"))]


def test_three_that_fall_silent_together_are_held_for_one_lease_and_no_longer() -> None:
    watch = detector()
    now = known(watch, "a", "b", "c")
    assert ticks(watch, now, now + 3.75) == []
    assert watch.doubt is not None
    assert "for 2 s" in watch.doubt
    assert watch.due_at() == pytest.approx(now + 4.0)
    assert watch.tick(now + 4.0).lapsed == ("a", "b", "c")
    assert watch.doubt is None


def test_the_minority_that_falls_silent_is_not_held() -> None:
    watch = detector()
    now = known(watch, "a", "b", "c", "d")
    lapsed = []
    for step in range(12):
        at = now + (step + 1) * TICK_S
        for well in "cd":
            watch.heard(well, at)
        lapsed += [(at - now, watch.tick(at).lapsed)]
    assert (2.0, ("a", "b")) in lapsed
    assert watch.doubt is None


def test_who_is_held_is_late_all_the_same() -> None:
    watch = detector()
    now = known(watch, "a", "b", "c")
    late: list[str] = []
    for step in range(8):
        late += watch.tick(now + (step + 1) * TICK_S).late
    assert late == ["a", "b", "c"]


def test_when_all_are_heard_again_nobody_was_lost() -> None:
    watch = detector()
    now = known(watch, "a", "b", "c")
    assert ticks(watch, now, now + 3.0) == []
    watch.heard("a", now + 3.1)
    watch.heard("b", now + 3.1)
    # What the cut held up of c was an answer, so it sends an interval later.
    assert watch.tick(now + 3.25).lapsed == ()
    assert watch.tick(now + 3.75).lapsed == ()
    watch.heard("c", now + 3.9)
    assert watch.tick(now + 4.0).lapsed == ()
    # A death after that is not held once they have been heard for a lease.
    for step in range(12):
        at = now + 4.0 + (step + 1) * TICK_S
        for well in "ab":
            watch.heard(well, at)
        gone = watch.tick(at).lapsed
        assert gone == (("c",) if at >= now + 5.9 else ())
        if gone:
            break
    assert watch.doubt is None


def test_a_cut_that_no_tick_has_seen_is_a_reason_to_doubt() -> None:
    """a is heard before the cut, b and c a little later; they are back before a's lease ends."""
    watch = detector()
    now = known(watch, "a", "b", "c")
    for name in "bc":
        watch.heard(name, now + 0.75)
    assert ticks(watch, now, now + 1.75) == []
    for name in "bc":
        watch.heard(name, now + 1.9)
    assert watch.tick(now + 2.0).lapsed == ()
    watch.heard("a", now + 2.1)
    assert ticks(watch, now + 2.1, now + 2.6) == []


def test_a_short_stop_of_the_machine_is_no_reason_to_doubt() -> None:
    """All were held up for a moment, which cannot have ended anybody's lease."""
    watch = detector()
    now = known(watch, "a", "b", "c")
    assert ticks(watch, now, now + 1.0) == []
    for name in "bc":
        watch.heard(name, now + HEARTBEAT_S + 0.15)
    assert ticks(watch, now + 1.0, now + 1.75) == []
    for name in "bc":
        watch.heard(name, now + 1.95)
    assert watch.tick(now + 2.0).lapsed == ("a",)


def test_a_doubt_lasts_a_lease_from_when_the_first_one_ended() -> None:
    watch = detector()
    now = known(watch, "a", "b", "c")
    assert ticks(watch, now + 0.2, now + 3.95) == []
    assert watch.due_at() == pytest.approx(now + 4.0)


def test_a_pause_of_the_monitor_starts_every_lease_anew_and_says_so() -> None:
    watch = detector()
    now = known(watch, "a", "b", "c")
    watch.tick(now + 0.25)
    assert watch.tick(now + 10.25).lapsed == ()
    assert watch.doubt == "this monitor was paused for 10.0 s: every lease starts anew"
    assert watch.due_at() == now + 12.25
    watch.tick(now + 10.5)
    assert watch.doubt is None


def test_those_who_have_to_find_a_restarted_monitor_have_time_for_it() -> None:
    watch = detector(grace_s=5.0)
    watch.watch("old", 0.0)
    assert ticks(watch, 0.0, 1.0) == []
    watch.watch("new", 1.0)
    # Who was heard since has a lease like anybody.
    assert ticks(watch, 1.0, 6.75) == [(2.0, ("new",))]
    assert watch.tick(7.0).lapsed == ("old",)


def test_of_nobody_nothing_is_due() -> None:
    watch = detector()
    assert watch.due_at() == math.inf
    watch.watch("a", 1.0)
    watch.forget("a")
    watch.forget("a")
    assert watch.due_at() == math.inf
    assert watch.tick(0.5).lapsed == ()
