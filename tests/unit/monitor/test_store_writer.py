"""After any events and any end of the monitor, the next one knows all that was announced."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eaas.types import Member, MemberState, Role
from monitor.records import Records
from monitor.registry import IdTakenError, Registry, UnknownIncarnationError
from monitor.store import Change, Kept, StoreLostError
from monitor.store.embedded import EmbeddedStore
from monitor.store_writer import Collector, StoreWriter
from waiting import eventually

LEASE_S, HEARTBEAT_S = 2.0, 0.9
SERVING, SUSPECT, DEAD = MemberState.SERVING, MemberState.SUSPECT, MemberState.DEAD
IDS = st.sampled_from(["a", "b", "c", "x.._-", ".x"])
STATES = st.sampled_from([MemberState.JOINING, SERVING, MemberState.DRAINING])


def member(member_id: str, pid: int = 1, state: MemberState = SERVING) -> Member:
    return Member(member_id, Role.EXPERT_SERVER, pid, "h", f"h:{pid}", state)


def seen_by_others(registry: Registry) -> dict[str, Member]:
    return {m.id: replace(m, progress=0, in_flight=0, silence_s=0.0) for m in registry.members(0.0)}


class KeptMachine(RuleBasedStateMachine):
    """A registry, a real file, and crashes between any two writes."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.store = EmbeddedStore(Path(self.directory.name))
        self.life = self.store.kept.life
        self.now = 0.0
        self.registry = Registry(LEASE_S, HEARTBEAT_S, self.now, self.store.kept)
        self.collector = Collector(self.registry)
        # The announced state: all that was written.
        self.told: dict[str, Member] = {}
        self.told_revision = 0
        self.highest: dict[str, int] = {}

    def teardown(self) -> None:
        self.store.close()
        self.directory.cleanup()

    # -- what happens --

    @rule(member_id=IDS, pid=st.integers(1, 2), state=STATES, goes_on=st.booleans())
    def register(self, member_id: str, pid: int, state: MemberState, goes_on: bool) -> None:
        previous = self.registry_member(member_id).incarnation if goes_on else 0
        try:
            incarnation, _ = self.registry.register(
                member(member_id, pid, state), previous, self.now
            )
        except IdTakenError:
            return
        if not previous:
            # A new process never gets an incarnation that was announced before.
            assert incarnation > self.highest.get(member_id, 0)

    def registry_member(self, member_id: str) -> Member:
        known = {m.id: m for m in self.registry.members(self.now)}
        return known.get(member_id, member(member_id))

    @rule(member_id=IDS, state=STATES, experts=st.integers(0, 3))
    def heartbeat(self, member_id: str, state: MemberState, experts: int) -> None:
        incarnation = self.registry_member(member_id).incarnation
        try:
            self.registry.heartbeat(
                member_id, incarnation, self.now, state=state, in_flight=7, experts=experts
            )
        except UnknownIncarnationError:
            return

    @rule(member_id=IDS)
    def deregister(self, member_id: str) -> None:
        self.registry.deregister(
            member_id, self.registry_member(member_id).incarnation, "", self.now
        )

    @rule(steps=st.integers(1, 30))
    def tick(self, steps: int) -> None:
        for _ in range(steps):
            self.now += LEASE_S / 4
            self.registry.tick(self.now)

    @rule(number=st.sampled_from([5, 70]))
    def many_come_and_go(self, number: int) -> None:
        for i in range(number):
            incarnation, _ = self.registry.register(member(f"m{i}", pid=9), 0, self.now)
            self.registry.deregister(f"m{i}", incarnation, "", self.now)

    @precondition(
        lambda self: self.registry.knows("a") and not self.registry_member("a").state.is_gone
    )
    @rule()
    def more_than_history_holds(self) -> None:
        incarnation = self.registry_member("a").incarnation
        for epoch in range(1, 1100):
            self.registry.heartbeat("a", incarnation, self.now, state=SERVING, epoch=epoch)

    # -- what is done about it --

    @rule()
    def write(self) -> None:
        self.store.write(self.collector.collect())
        self.told = seen_by_others(self.registry)
        self.told_revision = self.registry.revision
        for told in self.told.values():
            self.highest[told.id] = max(self.highest.get(told.id, 0), told.incarnation)

    @rule()
    def crash(self) -> None:
        self.store.close()
        self.store = EmbeddedStore(Path(self.directory.name))
        self.registry = Registry(LEASE_S, HEARTBEAT_S, self.now, self.store.kept)
        self.collector = Collector(self.registry)
        assert self.store.kept.life == self.life
        assert self.registry.revision == self.told_revision
        assert seen_by_others(self.registry) == self.told
        # A watcher that is up to date continues without a snapshot.
        assert self.registry.since(self.told_revision) == ()

    @rule()
    def restart(self) -> None:
        before, revision = seen_by_others(self.registry), self.registry.revision
        self.write()
        self.crash()
        assert (seen_by_others(self.registry), self.registry.revision) == (before, revision)

    @invariant()
    def nothing_is_announced_that_is_not_stored(self) -> None:
        assert self.told_revision <= self.registry.revision


# Its files are slow.
KeptMachine.TestCase.settings = settings(
    max_examples=settings.default.max_examples // 2, stateful_step_count=30
)
TestKeptMachine = KeptMachine.TestCase


# -- continued incarnations ------------------------------------------------------------------------


def kept_of(*members: Member, ticks: int = 0) -> Kept:
    """What a monitor has stored after these registrations and ticks."""
    former = Registry(LEASE_S, HEARTBEAT_S, 0.0)
    collector = Collector(former)
    for one in members:
        former.register(one, 0, 0.0)
    for tick in range(1, ticks + 1):
        former.tick(tick * LEASE_S / 8)
    change = collector.collect()
    return Kept(1, change.revision, 0, change.events)


def restored(*members: Member) -> Registry:
    return Registry(LEASE_S, HEARTBEAT_S, 0.0, kept_of(*members))


def test_more_events_than_history_holds_are_stored() -> None:
    registry = Registry(LEASE_S, HEARTBEAT_S, 0.0)
    collector = Collector(registry)
    registry.register(member("a"), 0, 0.0)
    registry.register(member("b"), 0, 0.0)
    assert len(collector.collect().events) == 2
    for epoch in range(1, 1100):
        registry.heartbeat("a", 1, 0.0, state=SERVING, epoch=epoch)
    (event,) = collector.collect().events
    assert (event.member.id, event.member.epoch) == ("a", 1099)


def test_a_restarted_monitor_continues_incarnations() -> None:
    registry = restored(member("a", pid=1), member("b", pid=1))
    assert registry.register(member("a", pid=1), 1, 0.1) == (1, [])
    # It may be about to return: its id stays reserved until that is known.
    with pytest.raises(IdTakenError):
        registry.register(member("b", pid=2), 0, 0.1)


def test_the_next_heartbeat_clears_a_restored_suspicion() -> None:
    kept = kept_of(member("a"), ticks=7)
    assert [e.member.state for e in kept.events] == [SUSPECT]
    registry = Registry(LEASE_S, HEARTBEAT_S, 5.0, kept)
    (event,) = registry.heartbeat("a", 1, 5.1, state=MemberState.DRAINING)
    assert (event.revision, event.member.state) == (kept.revision + 1, MemberState.DRAINING)


def test_a_pause_does_not_shorten_the_time_to_return() -> None:
    registry = restored(member("a"))
    assert registry.tick(1.5) == []
    deaths = [now for now in (2.0, 3.0, 4.0, 5.0, 6.0, 6.9) if _dead(registry, now)]
    assert deaths == []
    assert _dead(registry, 7.0)


def _dead(registry: Registry, now: float) -> bool:
    return any(event.member.state is DEAD for event in registry.tick(now))


def test_a_restored_monitor_member_is_dead() -> None:
    monitor = replace(member("monitor"), role=Role.MONITOR)
    kept = kept_of(monitor, member("a")).without_monitors()
    registry = Registry(LEASE_S, HEARTBEAT_S, 0.0, kept)
    assert {m.id: m.state for m in registry.members(0.0)} == {"monitor": DEAD, "a": SERVING}
    assert registry.register(replace(monitor, pid=2), 0, 0.0)[0] == 2


# -- the thread ---------------------------------------------------------------------------------------


class SlowStore:
    """A store that completes a write when the test allows it."""

    def __init__(self) -> None:
        self.kept = Kept(life=1)
        self.leads_until = float("inf")
        self.changes: list[Change] = []
        self.error: Exception | None = None
        self.begun = threading.Event()
        self.go = threading.Semaphore(0)

    def write(self, change: Change) -> None:
        self.begun.set()
        assert self.go.acquire(timeout=10)
        if self.error is not None:
            raise self.error
        self.changes.append(change)

    def close(self) -> None:
        """Nothing to release."""


@contextmanager
def journal(
    store: SlowStore, lost: list[str]
) -> Iterator[tuple[Registry, StoreWriter, threading.Condition]]:
    registry = Registry(LEASE_S, HEARTBEAT_S, 0.0)
    changed = threading.Condition(lock := threading.RLock())
    running = StoreWriter(registry, store, lock, changed.notify_all, lost.append, Records())
    yield registry, running, changed
    running.close()


def test_changes_during_a_write_go_into_the_next_one() -> None:
    store, lost = SlowStore(), list[str]()
    with journal(store, lost) as (registry, running, changed):
        with changed:
            registry.register(member("a"), 0, 0.0)
            running.wake()
        assert store.begun.wait(10)
        with changed:
            for name in "bcd":
                registry.register(member(name), 0, 0.0)
                running.wake()
            assert running.stored == 0
            store.go.release()
            assert changed.wait_for(lambda: running.stored == 1, 10)
            store.go.release()
            assert changed.wait_for(lambda: running.stored == 4, 10)
    assert [len(change.events) for change in store.changes] == [1, 3]
    assert lost == []


def test_close_writes_pending_changes() -> None:
    store = SlowStore()
    store.go.release(2)
    with journal(store, []) as (registry, _, changed), changed:
        registry.register(member("a"), 0, 0.0)
    assert [change.revision for change in store.changes] == [1]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (StoreLostError("the disk is full"), "the disk is full"),
        # A thread that ended silently would leave a monitor that answers no calls.
        (TypeError("a bug"), "the monitor's store writer failed: TypeError('a bug')"),
    ],
)
def test_a_failed_write_is_reported_once(error: Exception, told: str) -> None:
    store, lost = SlowStore(), list[str]()
    store.error = error
    store.go.release()
    with journal(store, lost) as (registry, running, changed):
        with changed:
            registry.register(member("a"), 0, 0.0)
            running.wake()
        eventually(lambda: lost)
        assert running.stored == 0
    assert lost == [told]


def test_close_does_not_wait_for_a_stuck_store() -> None:
    store = SlowStore()
    with journal(store, []) as (registry, running, changed):
        with changed:
            registry.register(member("a"), 0, 0.0)
            running.wake()
        assert store.begun.wait(10)
        running.close(0.05)
        assert store.changes == []
        store.go.release()
