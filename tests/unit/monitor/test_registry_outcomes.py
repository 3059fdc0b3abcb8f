"""Two reasons to suspect a server: its silence, and its clients' reports."""

from __future__ import annotations

import pytest

from eaas.types import Member, MemberState, Role
from monitor.failure_detection.failure_reports import RequestTotals
from monitor.incarnation import MemberEvent
from monitor.registry import IdTakenError, Registry, UnknownIncarnationError

LEASE_S, HEARTBEAT_S = 2.0, 0.9
TICK_S = LEASE_S / 8
SERVING, SUSPECT, DEAD = MemberState.SERVING, MemberState.SUSPECT, MemberState.DEAD
MEMORY_S = 20.0


class World:
    """A server "s" and clients that send heartbeats in time, unless a test stops them."""

    def __init__(self, *clients: str) -> None:
        self.registry = Registry(LEASE_S, HEARTBEAT_S, 0.0)
        self.now = 0.0
        self.silent: set[str] = set()
        self.state = SERVING
        self.events: list[MemberEvent] = []
        self.register("s", Role.EXPERT_SERVER)
        for client in clients:
            self.register(client, Role.ATTENTION_CLIENT)
        self.events.clear()

    def register(self, name: str, role: Role, previous: int = 0, pid: int = 1) -> int:
        member = Member(name, role, pid, "h", "", SERVING)
        incarnation, events = self.registry.register(member, previous, self.now)
        self.events += events
        return incarnation

    def run(self, seconds: float) -> None:
        """Advance the time: a tick each eighth of a lease, and the heartbeats."""
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            for member in self.registry.members(self.now):
                if not member.state.is_gone and member.id not in self.silent:
                    state = self.state if member.id == "s" else SERVING
                    self.events += self.registry.heartbeat(
                        member.id, member.incarnation, self.now, state=state
                    )
            self.events += self.registry.tick(self.now)

    def say(self, client: str, said: RequestTotals, about: str = "s", incarnation: int = 1) -> None:
        self.events += self.registry.report_outcomes(
            client, 1, [(about, incarnation, said)], self.now
        )

    def told(self) -> list[tuple[str, MemberState, str]]:
        """The events since the last call."""
        told = [(e.member.id, e.member.state, e.reason) for e in self.events]
        self.events.clear()
        return told


@pytest.fixture
def accused() -> World:
    """A server that its only client suspects, as the last event says."""
    world = World("a")
    world.say("a", RequestTotals(1, 0, 1))
    world.run(2.0)
    return world


def test_clients_without_answers_make_a_live_server_suspect_and_never_dead() -> None:
    world = World("a", "b", "c")
    for client in "abc":
        world.say(client, RequestTotals(1, 0, 1))
    world.run(2.0)
    assert world.told() == [("s", SUSPECT, "3 of 3 clients get no answers")]
    # Its heartbeats continue, so it never becomes DEAD.
    for total in range(2, 40):
        world.say("a", RequestTotals(total, 0, total))
        world.run(1.0)
    assert world.told() == []
    world.say("a", RequestTotals(40, 1, 0))
    assert world.told() == [("s", SERVING, "its clients get answers again")]


def test_a_cleared_server_has_its_latest_reported_state(accused: World) -> None:
    accused.state = MemberState.DRAINING
    accused.run(MEMORY_S)
    assert [event[1] for event in accused.told()] == [SUSPECT, MemberState.DRAINING]


@pytest.mark.parametrize("answers", [True, False])
def test_one_suspicion_suffices(accused: World, answers: bool) -> None:
    accused.silent.add("s")
    accused.run(1.75)
    accused.told()
    if answers:
        # Answers are reported, but it is still silent.
        accused.say("a", RequestTotals(2, 1, 0))
        assert accused.told() == []
    accused.silent.clear()
    accused.run(3.0)
    # A heartbeat alone clears no accusation.
    assert accused.told() == ([("s", SERVING, "heard again")] if answers else [])


def test_an_accused_server_keeps_its_id(accused: World) -> None:
    """Another process may take the id of a silent member, but this one is not silent."""
    with pytest.raises(IdTakenError):
        accused.register("s", Role.EXPERT_SERVER, pid=2)
    # The same process registers again, as after a broken stream.
    assert accused.register("s", Role.EXPERT_SERVER, previous=1) == 1
    assert accused.registry.members(accused.now)[0].state is SUSPECT


@pytest.mark.parametrize("leaves", [True, False])
def test_a_new_incarnation_begins_without_suspicion(accused: World, leaves: bool) -> None:
    if leaves:
        accused.registry.deregister("s", 1, "", accused.now)
    assert accused.register("s", Role.EXPERT_SERVER) == 2
    accused.told()
    # Reports about the former incarnation have no effect.
    accused.say("a", RequestTotals(9, 0, 9), incarnation=1)
    accused.run(5.0)
    assert accused.told() == []


def test_reports_of_a_gone_client_are_refused() -> None:
    world = World("a", "b")
    world.say("a", RequestTotals(1, 0, 1))
    world.registry.deregister("a", 1, "", world.now)
    world.run(5.0)
    assert world.told() == []
    with pytest.raises(UnknownIncarnationError):
        world.say("a", RequestTotals(2, 0, 2))
    with pytest.raises(UnknownIncarnationError):
        world.say("nobody", RequestTotals(2, 0, 2))
    with pytest.raises(UnknownIncarnationError):
        world.registry.report_outcomes("b", 2, [], world.now)


def test_only_clients_report_and_only_of_servers() -> None:
    world = World("a", "b")
    with pytest.raises(ValueError, match="s is not an attention client"):
        world.say("s", RequestTotals(1, 0, 1))
    world.say("a", RequestTotals(1, 0, 1), about="b")
    world.say("a", RequestTotals(1, 0, 1), about="nobody")
    world.say("a", RequestTotals(1, 0, 1), incarnation=2)
    world.run(5.0)
    assert world.told() == []


def test_a_pause_of_the_monitor_accuses_nobody() -> None:
    """One client is cut off, another gets answers; then the monitor hears no member for ten seconds."""
    world = World("a", "b")
    world.say("a", RequestTotals(1, 0, 1))
    world.say("b", RequestTotals(1, 1, 0))
    world.run(1.0)
    world.now += 10.0
    world.say("a", RequestTotals(2, 0, 2))
    world.run(0.5)
    world.say("b", RequestTotals(2, 2, 0))
    world.run(1.0)
    assert world.told() == []
