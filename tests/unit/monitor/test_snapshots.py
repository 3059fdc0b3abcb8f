"""A snapshot built in parts is the snapshot of one revision, and the events after it complete the view."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.membership.cluster_view import MembershipFold, members_of
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.types import Member, MemberState, ModelShape, Role
from monitor.fanout import Fanout
from monitor.registry import IdTakenError, Registry, UnknownIncarnationError
from monitor.snapshots import Knows, Snapshots

LEASE_S, HEARTBEAT_S = 2.0, 0.9
LIFE = 77
SERVING, DRAINING = MemberState.SERVING, MemberState.DRAINING
SHAPES = [
    None,
    *(ModelShape("m", experts, 8, 2, ("a", "b"), "float32", "0" * 64) for experts in (4, 8)),
]


def member(number: int, model: ModelShape | None = None) -> Member:
    return Member(
        *(f"m{number}", Role.EXPERT_SERVER, 1 + number, "h", f"h:{number}", SERVING), model=model
    )


def snapshots_of(registry: Registry, part: int = 1) -> Snapshots:
    return Snapshots(registry, threading.RLock(), LIFE, part)


def told(message: bytes) -> pb.Snapshot:
    response = pb.WatchResponse.FromString(message)
    assert response.WhichOneof("kind") == "snapshot"
    return response.snapshot


@given(
    data=st.data(),
    knows=st.builds(Knows, *[st.booleans()] * 3),
    count=st.integers(0, 12),
    part=st.integers(1, 5),
)
def test_the_parts_join_to_the_snapshot_in_one_piece(
    data: st.DataObject, knows: Knows, count: int, part: int
) -> None:
    registry = Registry(LEASE_S, HEARTBEAT_S, time.monotonic())
    for number in range(count):
        now = time.monotonic()
        role = data.draw(st.sampled_from([Role.EXPERT_SERVER, Role.FRONTEND]))
        shape = data.draw(st.sampled_from(SHAPES))
        registry.register(replace(member(number, shape), role=role), 0, now)
        counters: dict[str, Any] = data.draw(
            st.fixed_dictionaries(
                {
                    "progress": st.integers(0, 2**63),
                    "in_flight": st.integers(0, 2**31),
                    "busy_s": st.floats(0, 1e9),
                    "loading_bytes": st.integers(0, 2**40),
                    "experts": st.integers(0, 300),
                }
            )
        )
        registry.heartbeat(f"m{number}", 1, now, state=SERVING, **counters)
        if data.draw(st.booleans()):
            registry.deregister(f"m{number}", 1, "goodbye", now)
    revision, message = asyncio.run(snapshots_of(registry, part).take(knows))
    found = told(message)
    assert (found.revision, found.life) == (revision, LIFE) == (registry.revision, LIFE)
    assert all(m.silence_s >= 0 for m in found.members)
    for one in found.members:
        one.silence_s = 0.0
        assert not (one.HasField("model") if knows.models else one.model_number)
    listed = [m for m in registry.members(0.0) if knows.frontends or m.role is not Role.FRONTEND]
    shapes = {m.model for m in listed if m.model is not None}
    assert len(found.models) == (len(shapes) if knows.models else 0)
    states = {} if knows.left else {MemberState.LEFT: MemberState.DEAD}
    assert members_of(found) == [
        replace(m, silence_s=0.0, state=states.get(m.state, m.state)) for m in listed
    ]


CHANGES = st.lists(
    st.tuples(st.sampled_from(["register", "drain", "serve", "leave"]), st.integers(0, 7)),
    max_size=30,
)


def change(registry: Registry, kind: str, number: int) -> None:
    now = time.monotonic()
    known = registry.living(f"m{number}")
    incarnation = known.incarnation if known else 0
    try:
        if kind == "register":
            registry.register(member(number), 0, now)
        elif kind == "leave":
            registry.deregister(f"m{number}", incarnation, "", now)
        else:
            state = DRAINING if kind == "drain" else SERVING
            registry.heartbeat(f"m{number}", incarnation, now, state=state, experts=number)
    except (IdTakenError, UnknownIncarnationError):
        pass


@given(before=CHANGES, during=st.lists(CHANGES, max_size=8), after=CHANGES)
def test_events_after_the_revision_complete_the_view(
    before: list[tuple[str, int]],
    during: list[list[tuple[str, int]]],
    after: list[tuple[str, int]],
) -> None:
    registry = Registry(LEASE_S, HEARTBEAT_S, time.monotonic())
    fold = MembershipFold()

    async def scenario() -> None:
        for kind, number in before:
            change(registry, kind, number)
        taking = asyncio.create_task(snapshots_of(registry).take(Knows()))
        # Changes between any two parts of the build.
        for changes in during:
            await asyncio.sleep(0)
            for kind, number in changes:
                change(registry, kind, number)
        revision, message = await taking
        for kind, number in after:
            change(registry, kind, number)
        fold.take(pb.WatchResponse.FromString(message), 0.0)
        assert fold.view.revision == revision
        fanout = Fanout(asyncio.get_running_loop(), 1.0)
        for event in registry.since(revision) or ():
            fold.take(pb.WatchResponse.FromString(fanout.message(event, Knows())), 0.0)

    asyncio.run(scenario())
    assert fold.view.revision == registry.revision
    seen = {name: replace(m, silence_s=0.0) for name, m in fold.view.members.items()}
    assert seen == {m.id: replace(m, silence_s=0.0) for m in registry.members(0.0)}


def test_watchers_that_come_together_share_one_build(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(LEASE_S, HEARTBEAT_S, time.monotonic())
    captures = []
    original = registry.capture
    monkeypatch.setattr(registry, "capture", lambda: captures.append(1) or original())

    async def scenario() -> None:
        for number in range(10):
            change(registry, "register", number)
        snapshots = snapshots_of(registry)
        first = [asyncio.create_task(snapshots.take(Knows())) for _ in range(100)]
        for _ in range(3):
            await asyncio.sleep(0)
        # The build goes on without the watcher that began it.
        first[0].cancel()
        change(registry, "register", 10)
        # They need a later build, and share it too.
        second = [asyncio.create_task(snapshots.take(Knows())) for _ in range(100)]
        before = {id(message) for _, message in await asyncio.gather(*first[1:])}
        later = await asyncio.gather(*second)
        assert len(before) == 1
        assert len({id(message) for _, message in later}) == 1
        assert {revision for revision, _ in later} == {registry.revision}
        assert len(captures) == 2

    asyncio.run(scenario())


def test_other_work_is_done_during_a_build() -> None:
    """As often as there are turns of the loop between the parts."""
    members = 1000

    async def scenario() -> int:
        registry = Registry(LEASE_S, HEARTBEAT_S, time.monotonic())
        for number in range(members):
            registry.register(member(number, SHAPES[1]), 0, time.monotonic())
        taking = asyncio.create_task(snapshots_of(registry, 10).take(Knows()))
        answered = 0
        while not taking.done():
            answered += 1
            await asyncio.sleep(0)
        assert len(told((await taking)[1]).members) == members
        return answered

    assert asyncio.run(scenario()) >= members // 10
