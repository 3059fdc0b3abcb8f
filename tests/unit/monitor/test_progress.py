"""A member that sends heartbeats but makes no progress."""

from __future__ import annotations

import pytest

from eaas.types import Member, MemberState, Role
from monitor.incarnation import MemberEvent
from monitor.registry import IdTakenError, Registry

LEASE_S, HEARTBEAT_S = 2.0, 0.9
SERVING, SUSPECT = MemberState.SERVING, MemberState.SUSPECT


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


def test_a_stuck_server_keeps_its_id() -> None:
    """Another process may take the id of a silent member, but this one is not silent."""
    world = World()
    world.beat(0.9, 5, 3, 1.6)
    with pytest.raises(IdTakenError):
        world.registry.register(Member("s", Role.EXPERT_SERVER, 2, "h", "", SERVING), 0, 1.0)


def test_clients_wait_for_others_and_are_not_stuck() -> None:
    world = World(Role.ATTENTION_CLIENT)
    for beat in range(40):
        assert world.beat(beat * 0.9, 5, 3, 1.6) == []
    (member,) = world.registry.members(40 * 0.9)
    assert (member.progress, member.in_flight) == (5, 3)


def test_a_stuck_server_that_falls_silent_is_dead_in_the_end() -> None:
    world = World()
    world.beat(0.9, 5, 3, 1.6)
    world.registry.tick(1.9)
    world.registry.tick(2.4)
    (event,) = world.registry.tick(2.9)
    assert event.member.state is MemberState.DEAD
