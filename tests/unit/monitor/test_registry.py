"""The registry's rules, by example, under random schedules and under random calls."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eaas.net.message_ranges import MOST_EPOCH, TRUSTED_EPOCH
from eaas.rpc.v1 import common_pb2, monitor_pb2
from eaas.types import Member, MemberState, Role, ServerReach
from membership_sim import Watcher
from monitor.refusal import Refused, reach_of
from monitor.registry import IdTakenError, Registry, UnknownIncarnationError

LEASE_S, HEARTBEAT_S = 2.0, 0.9
TICK_S = LEASE_S / 8
SERVING = MemberState.SERVING


def member(
    member_id: str = "a", pid: int = 1, state: MemberState = MemberState.JOINING, host: str = "h"
) -> Member:
    return Member(member_id, Role.EXPERT_SERVER, pid, host, f"{host}:{pid}", state)


@pytest.fixture
def registry() -> Registry:
    return Registry(LEASE_S, HEARTBEAT_S, 0.0)


def tick_until(registry: Registry, start: float, end: float) -> list[tuple[str, MemberState]]:
    seen = []
    now = start
    while now < end:
        now += TICK_S
        seen += [(e.member.id, e.member.state) for e in registry.tick(now)]
    return seen


# -- by example ------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_one_tick", [False, True])
def test_a_silent_member_is_suspect_then_dead(registry: Registry, in_one_tick: bool) -> None:
    registry.register(member(), 0, 0.0)
    assert tick_until(registry, 0.0, 1.25) == []
    suspect, dead = ("a", MemberState.SUSPECT), ("a", MemberState.DEAD)
    if in_one_tick:
        assert [(e.member.id, e.member.state) for e in registry.tick(2.1)] == [suspect, dead]
    else:
        assert tick_until(registry, 1.25, 1.5) == [suspect]
        assert tick_until(registry, 1.5, 1.75) == []
        assert tick_until(registry, 1.75, 2.0) == [dead]
    with pytest.raises(UnknownIncarnationError):
        registry.heartbeat("a", 1, 2.1, state=SERVING)


def test_thousands_end_in_several_ticks(registry: Registry) -> None:
    """Each tick is bounded, and the next one is due at once; all end, and those that are heard do not."""
    count, alive = 1500, 2
    for number in range(count):
        registry.register(member(f"m{number}", number + 1), 0, 0.0)
    seen: dict[str, list[MemberState]] = {}
    now, busy = 0.0, 0
    # The monitor holds the ended leases for another lease, because most members fell silent together.
    while now < 3 * LEASE_S:
        now += 0.01 if registry.due_at() <= now else TICK_S
        for number in range(alive):
            registry.heartbeat(f"m{number}", 1, now, state=SERVING)
        events = registry.tick(now)
        states = [e.member.state for e in events if not e.forgotten]
        assert max(states.count(MemberState.SUSPECT), states.count(MemberState.DEAD)) <= 200
        busy += registry.due_at() <= now
        for event in events:
            if not event.forgotten:
                seen.setdefault(event.member.id, []).append(event.member.state)
    assert busy >= 2 * (count // 200 - 1)
    ended = [f"m{number}" for number in range(alive, count)]
    assert seen == {name: [MemberState.SUSPECT, MemberState.DEAD] for name in ended}


def test_counters_make_no_events_but_are_in_snapshots(registry: Registry) -> None:
    registry.register(member(state=SERVING), 0, 0.0)
    beat = {"in_flight": 7, "progress": 9, "busy_s": 1.5, "loading_bytes": 90, "loaded_bytes": 30}
    assert registry.heartbeat("a", 1, 0.5, state=SERVING, **beat) == []
    (now,) = registry.members(0.75)
    assert {name: getattr(now, name) for name in beat} == beat
    assert now.silence_s == 0.25
    # A heartbeat of a former release has no load, and a member that ended loads nothing.
    (event,) = registry.heartbeat("a", 1, 1.0, state=SERVING, experts=3, epoch=1)
    assert (event.member.experts, event.member.epoch) == (3, 1)
    assert registry.members(1.0)[0].loading_bytes == 0
    registry.heartbeat("a", 1, 1.1, state=SERVING, experts=3, epoch=1, **beat)
    (event,) = registry.deregister("a", 1, "", 1.2)
    assert (event.member.loading_bytes, registry.members(1.2)[0].loading_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("role", "leaves", "seconds"),
    [
        (Role.ATTENTION_CLIENT, True, 60),
        (Role.ATTENTION_CLIENT, False, 600),
        (Role.EXPERT_SERVER, True, 60),
        (Role.EXPERT_SERVER, False, 86_400),
    ],
)
def test_a_member_that_ended_is_listed_for_a_time(
    registry: Registry, role: Role, leaves: bool, seconds: float
) -> None:
    registry.register(replace(member(), role=role), 0, 0.0)
    if leaves:
        registry.deregister("a", 1, "", 0.0)
    else:
        assert tick_until(registry, 0.0, 2.0)[-1] == ("a", MemberState.DEAD)
    assert not registry.tick(seconds - 1.0)
    (event,) = registry.tick(seconds + 3.0)
    assert event.forgotten
    assert not registry.knows("a")
    # Its incarnation is not given again.
    assert registry.register(member(), 0, seconds + 4.0)[0] == 2


def test_tombstones_are_bounded_and_forgotten_incarnations_are_not_given_again(
    registry: Registry,
) -> None:
    registry.register(member("dead"), 0, -4.0)
    tick_until(registry, -4.0, 0.0)
    for count in range(1, 4):
        assert registry.register(member("first"), 0, 0.0)[0] == count
        registry.deregister("first", count, "", 0.0)
    forgotten = []
    for i in range(100):
        incarnation, _ = registry.register(member(f"m{i}"), 0, float(i) / 100)
        events = registry.deregister(f"m{i}", incarnation, "", float(i) / 100)
        forgotten += [e.member.id for e in events if e.forgotten]
    assert len(registry.members(1.0)) == 1 + 64
    assert registry.knows("dead"), "the dead are listed for longer than those that left"
    assert forgotten == ["first", *(f"m{i}" for i in range(36))], "watchers are told of each"
    assert registry.register(member("first"), 0, 1.0)[0] > 3
    assert registry.register(member("m0"), 1, 1.0)[0] > 1


def test_incarnations_never_run_out(registry: Registry) -> None:
    """A member that claims a huge one must not use them up."""
    assert registry.register(member("liar"), MOST_EPOCH, 0.0)[0] == 1
    assert registry.register(member("of a former monitor"), 7, 0.0)[0] == 7
    incarnation, _ = registry.register(member("other"), TRUSTED_EPOCH, 0.0)
    assert incarnation == TRUSTED_EPOCH
    registry.deregister("other", incarnation, "", 0.0)
    assert registry.tick(100.0)[0].forgotten
    assert registry.register(member("new"), 0, 100.0)[0] == TRUSTED_EPOCH + 1


@pytest.mark.parametrize("ended", [[1], [1, 2]], ids=["it", "and one that never registered"])
def test_a_process_that_was_seen_to_end_frees_its_id_at_once(
    registry: Registry, ended: list[int]
) -> None:
    registry.register(member(pid=1), 0, 0.0)
    incarnation, events = registry.register(member(pid=3), 0, 0.1, ended)
    told = [(e.member.incarnation, e.member.state) for e in events]
    assert told == [(1, MemberState.DEAD), (2, MemberState.JOINING)]
    assert events[0].reason == "its parent saw it end"
    assert incarnation == 2
    with pytest.raises(UnknownIncarnationError):
        registry.heartbeat("a", 1, 0.2, state=SERVING)
    # Repeated after a lost answer: it concerns no live process.
    assert registry.register(member(pid=3), 2, 0.2, ended) == (2, [])


@pytest.mark.parametrize(
    ("again", "previous", "ended", "expected"),
    [
        (member(), 1, [], 1),
        # In containers all pids are 1: a new process.
        (member(), 0, [], 2),
        (member(), 5, [], 6),
        # Its pid may be that of a predecessor whose end its parent saw.
        (member(), 1, [1], 1),
        # The end of another process was seen, not that of the one which has the id.
        (member(pid=2), 0, [7], None),
        (member(pid=2, host="other"), 0, [1], None),
    ],
)
def test_who_registers_while_the_id_is_in_use(
    registry: Registry, again: Member, previous: int, ended: list[int], expected: int | None
) -> None:
    assert registry.register(member(), 0, 0.0)[0] == 1
    if expected is None:
        with pytest.raises(IdTakenError):
            registry.register(again, previous, 0.1, ended)
    else:
        incarnation, events = registry.register(again, previous, 0.1, ended)
        assert incarnation == expected
        assert (events == []) == (expected == 1), "no event if nothing has changed"
    assert registry.members(0.1)[0].incarnation == (expected or 1)


@pytest.mark.parametrize("state", [MemberState.SUSPECT, MemberState.DEAD, MemberState.LEFT])
def test_members_cannot_report_monitor_states(registry: Registry, state: MemberState) -> None:
    with pytest.raises(ValueError, match="does not report"):
        registry.register(member(state=state), 0, 0.0)
    registry.register(member(), 0, 0.0)
    with pytest.raises(ValueError, match="does not report"):
        registry.heartbeat("a", 1, 0.0, state=state)
    with pytest.raises(ValueError, match="needs an id"):
        registry.register(member(""), 0, 0.0)


def test_history_is_bounded(registry: Registry) -> None:
    registry.register(member(), 0, 0.0)
    for epoch in range(1, 2000):
        registry.heartbeat("a", 1, 0.0, state=SERVING, epoch=epoch)
    assert registry.revision == 2000
    assert registry.since(2000) == ()
    kept = registry.since(2000 - 1024)
    assert kept is not None
    assert [e.revision for e in kept] == list(range(2000 - 1024 + 1, 2001))
    assert registry.since(2000 - 1025) is None
    assert registry.since(2001) is None
    assert registry.since(-1) is None


# -- the servers that clients reach -----------------------------------------------------------------

REACH = (ServerReach("s", 1, "another user's", lost=True), ServerReach("t", 2))


def caller(name: str, role: Role, reach: tuple[ServerReach, ...] | None = None) -> Member:
    return replace(member(name, state=SERVING), role=role, reach=reach)


def test_a_heartbeat_replaces_the_reach_and_silence_keeps_it(registry: Registry) -> None:
    incarnation, _ = registry.register(caller("c", Role.ATTENTION_CLIENT, ()), 0, 0.0)

    def beat(reach: tuple[ServerReach, ...] | None) -> int:
        events = registry.heartbeat("c", incarnation, 0.1, state=SERVING, reach=reach)
        return len(events)

    def kept() -> tuple[ServerReach, ...] | None:
        living = registry.living("c")
        assert living is not None
        return living.reach

    assert kept() == ()
    assert beat(REACH) == 1
    assert beat(REACH) == beat(None) == 0
    assert kept() == REACH
    # The same incarnation registers again: its next heartbeat reports its reach.
    registry.register(caller("c", Role.ATTENTION_CLIENT, ()), incarnation, 0.2)
    assert kept() == REACH
    assert beat(()) == 1
    assert kept() == ()


def test_only_clients_report_a_reach(registry: Registry) -> None:
    incarnation, _ = registry.register(caller("s", Role.EXPERT_SERVER), 0, 0.0)
    with pytest.raises(ValueError, match="not an attention client"):
        registry.heartbeat("s", incarnation, 0.1, state=SERVING, reach=REACH)


def test_a_large_reach_is_refused() -> None:
    request = monitor_pb2.HeartbeatRequest(id="c")
    assert reach_of(request) is None
    request.reach.CopyFrom(ServerReach.to_proto(REACH))
    assert reach_of(request) == REACH
    many = [common_pb2.ServerReach(server_id="x" * 200) for _ in range(3000)]
    request.reach.CopyFrom(common_pb2.Reach(servers=many))
    with pytest.raises(Refused) as caught:
        reach_of(request)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


# -- random calls ----------------------------------------------------------------------------------

IDS = st.sampled_from(["a", "b", "c"])
PIDS = st.integers(1, 2)
STATES = st.sampled_from([MemberState.JOINING, SERVING, MemberState.DRAINING])


class RegistryMachine(RuleBasedStateMachine):
    """In any order of calls, revisions and incarnations only rise, and watchers keep up."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.registry = Registry(LEASE_S, HEARTBEAT_S, self.now)
        self.given: dict[str, int] = {}
        self.sessions: dict[str, int] = {}
        self.watcher = Watcher()
        self.revision = 0

    @rule(
        member_id=IDS,
        pid=PIDS,
        state=STATES,
        claims=st.booleans(),
        ended=st.lists(PIDS, max_size=2),
        has_session=st.booleans(),
    )
    def register(
        self,
        member_id: str,
        pid: int,
        state: MemberState,
        claims: bool,
        ended: list[int],
        has_session: bool,
    ) -> None:
        known = {m.id: m for m in self.registry.members(self.now)}.get(member_id)
        previous = self.given.get(member_id, 0) if claims else 0
        session = pid if has_session else 0
        is_repeated = session != 0 and self.sessions.get(member_id) == session
        try:
            incarnation, _ = self.registry.register(
                member(member_id, pid, state), previous, self.now, ended, session
            )
        except IdTakenError:
            assert known is not None
            assert known.state is not MemberState.SUSPECT
            assert not known.state.is_gone
            assert known.pid != pid
            assert known.pid not in ended or previous
            return
        goes_on = (
            known is not None
            and not known.state.is_gone
            and known.pid == pid
            and (previous == known.incarnation or is_repeated)
        )
        before = self.given.get(member_id, 0)
        assert incarnation == before if goes_on else incarnation > before
        self.given[member_id] = incarnation
        if not goes_on:
            self.sessions[member_id] = session

    @precondition(lambda self: self.given)
    @rule(data=st.data(), state=STATES, stale=st.booleans())
    def heartbeat(self, data: st.DataObject, state: MemberState, stale: bool) -> None:
        member_id = data.draw(st.sampled_from(sorted(self.given)))
        incarnation = self.given[member_id] - stale
        known = {m.id: m for m in self.registry.members(self.now)}.get(member_id)
        try:
            self.registry.heartbeat(member_id, incarnation, self.now, state=state)
        except UnknownIncarnationError:
            assert stale or known is None or known.state.is_gone
            return
        assert not stale
        assert known is not None
        assert not known.state.is_gone
        after = {m.id: m for m in self.registry.members(self.now)}[member_id]
        assert (after.state, after.silence_s) == (state, 0.0)

    @precondition(lambda self: self.given)
    @rule(data=st.data(), stale=st.booleans())
    def deregister(self, data: st.DataObject, stale: bool) -> None:
        member_id = data.draw(st.sampled_from(sorted(self.given)))
        events = self.registry.deregister(member_id, self.given[member_id] - stale, "bye", self.now)
        assert not (stale and events)

    @rule(step=st.floats(0.0, 5.0))
    def tick(self, step: float) -> None:
        before = {m.id: m for m in self.registry.members(self.now)}
        self.now += step
        for event in self.registry.tick(self.now):
            gone = before[event.member.id].state.is_gone
            assert event.forgotten if gone else step <= LEASE_S / 2

    @rule()
    def watch(self) -> None:
        self.watcher.catch_up(self.registry, self.now)
        self.watcher.check(self.registry, self.now)

    @invariant()
    def revisions_rise_by_one_per_event(self) -> None:
        events = self.registry.since(self.revision)
        assert events is not None
        expected = range(self.revision + 1, self.revision + 1 + len(events))
        assert [e.revision for e in events] == list(expected)
        self.revision = self.registry.revision


RegistryMachine.TestCase.settings = settings(stateful_step_count=30)
TestRegistryMachine = RegistryMachine.TestCase
