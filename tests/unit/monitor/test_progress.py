"""A member that sends heartbeats but makes no progress."""

from __future__ import annotations

from eaas.types import Member, MemberState, Role
from monitor.failure_detection.progress import Progress
from monitor.incarnation import MemberEvent
from monitor.registry import Registry

LEASE_S, HEARTBEAT_S = 2.0, 0.9
SERVING, SUSPECT = MemberState.SERVING, MemberState.SUSPECT


def beats(progress: Progress, start: float, end: float, count: int, in_flight: int) -> list[float]:
    """Send equal heartbeats; returns at which of them the member was stuck."""
    stuck, now = [], start
    while now <= end:
        progress.reported(count, in_flight, 0.0, now)
        if progress.stuck:
            stuck.append(now - start)
        now += 1.0
    return stuck


def test_an_idle_member_is_not_stuck() -> None:
    progress = Progress(LEASE_S)
    assert beats(progress, 0.0, 100.0, count=7, in_flight=0) == []
    # The idle time does not count later, either.
    assert beats(progress, 101.0, 109.0, count=7, in_flight=1) == []


def test_patience_is_five_leases_or_twice_the_longest_standstill() -> None:
    progress = Progress(LEASE_S)
    for now in range(-100, 0):
        progress.reported(now + 107, 9, 0.0, float(now))
        assert progress.stuck is None, "its work moves"
    assert beats(progress, 0.0, 9.0, count=7, in_flight=1) == []
    progress.reported(7, 1, 0.0, 10.0)
    assert progress.stuck == "no progress for 10.0 s with 1 request in flight"
    assert beats(progress, 11.0, 12.0, count=7, in_flight=1) == [0.0, 1.0]
    progress.reported(8, 1, 0.0, 13.0)
    assert progress.stuck is None
    assert beats(progress, 13.0, 40.0, count=8, in_flight=1)[0] == 26.0


# -- in the registry -------------------------------------------------------------------------------


class World:
    def __init__(self, role: Role = Role.EXPERT_SERVER) -> None:
        self.registry = Registry(LEASE_S, HEARTBEAT_S, 0.0)
        self.registry.register(Member("s", role, 1, "h", "", SERVING), 0, 0.0)

    def beat(
        self, now: float, progress: int, in_flight: int, stalled_s: float
    ) -> list[MemberEvent]:
        return self.registry.heartbeat(
            "s", 1, now, state=SERVING, progress=progress, in_flight=in_flight, stalled_s=stalled_s
        ) + self.registry.tick(now)


def test_row_5_a_wedged_loop_behind_a_live_heartbeat() -> None:
    """Row 5: its compute loop wedged, its heartbeat thread alive: the heartbeat carries a progress
    counter; NOT_SERVING within W.
    """
    world = World()
    assert world.beat(0.9, 5, 3, 0.0) == []
    (event,) = world.beat(1.7, 5, 3, 1.6)
    assert event.member.state is SUSPECT
    assert event.reason == "no progress for 1.6 s with 3 requests in flight"
    # One event, however long it lasts, and the server never becomes DEAD.
    for beat in range(40):
        assert world.beat(2.0 + beat, 5, 3, 2.0 + beat) == []
    (event,) = world.beat(42.0, 6, 2, 0.0)
    assert (event.member.state, event.reason) == (SERVING, "its work moves again")


def test_clients_wait_for_others_and_are_not_stuck() -> None:
    world = World(Role.ATTENTION_CLIENT)
    for beat in range(40):
        assert world.beat(beat * 0.9, 5, 3, 0.0) == []
    (member,) = world.registry.members(40 * 0.9)
    assert (member.progress, member.in_flight) == (5, 3)


def test_a_stuck_server_that_falls_silent_is_dead_in_the_end() -> None:
    world = World()
    world.beat(0.9, 5, 3, 1.6)
    world.registry.tick(1.9)
    world.registry.tick(2.4)
    (event,) = world.registry.tick(2.9)
    assert event.member.state is MemberState.DEAD
