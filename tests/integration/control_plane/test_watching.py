"""Many Watch streams: their cost, their signs of life, and slow watchers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from benchmarks.scale.members import SimulatedMembers
from control_plane import PATIENCE_S, SERVING, Plane, registration
from eaas.membership.cluster_view import MembershipFold
from eaas.net.grpc_client import STREAM_SIGN_S, channel
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.rpc.v1 import monitor_pb2_grpc
from eaas.types import Role

pytestmark = pytest.mark.integration
MEMBERS = 300


@pytest.fixture
def stub(plane: Plane) -> Iterator[monitor_pb2_grpc.MonitorServiceStub]:
    with channel(plane.monitor().address) as line:
        yield monitor_pb2_grpc.MonitorServiceStub(line)


def snapshot_of(address: str) -> pb.Snapshot:
    with channel(address) as line:
        stub = monitor_pb2_grpc.MonitorServiceStub(line)
        return next(iter(stub.Watch(pb.WatchRequest(), timeout=PATIENCE_S))).snapshot


def test_members_cost_no_threads(plane: Plane) -> None:
    """Each member has two streams: together more than any thread pool here has threads."""
    # A busy machine must not end a lease.
    monitor = plane.monitor(lease_s=20.0)
    before = threading.active_count()

    async def live() -> None:
        async with SimulatedMembers(monitor.address, range(MEMBERS), 0.5) as members:
            await members.join()
            now = await asyncio.to_thread(snapshot_of, monitor.address)
            members.watch(MEMBERS, now.revision, now.life)
            figures = {"sent": 0, "watched": 0}
            async with asyncio.timeout(PATIENCE_S):
                while figures["sent"] < 2 * MEMBERS or figures["watched"] < MEMBERS:
                    await asyncio.sleep(0.05)
                    found = members.take_figures()
                    assert found["ended"] == 0
                    figures = {name: figures[name] + found[name] for name in figures}
            # One of gRPC's own, and one that took the snapshot.
            assert threading.active_count() <= before + 4

    asyncio.run(live())


@pytest.mark.parametrize("heartbeats_tell", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_signs_of_life_are_for_those_that_have_no_other(stub: Any, heartbeats_tell: bool) -> None:
    snapshot = next(iter(stub.Watch(pb.WatchRequest(), timeout=PATIENCE_S))).snapshot
    position = pb.WatchRequest(
        from_revision=snapshot.revision, life=snapshot.life, heartbeats_tell=heartbeats_tell
    )
    began = time.monotonic()
    call = stub.Watch(position, timeout=1.5 * STREAM_SIGN_S)
    told = []
    with contextlib.suppress(grpc.RpcError):
        for response in call:
            told.append(time.monotonic() - began)
            assert response.still_at_revision == snapshot.revision
    if heartbeats_tell:
        # The first response says that the stream has begun.
        (first,) = told
        assert first < STREAM_SIGN_S / 2
    else:
        (sign,) = told
        assert sign >= STREAM_SIGN_S


def test_watchers_of_an_earlier_release_meet_no_frontend(stub: Any) -> None:
    """They know neither the role nor, of its events, more than that the revision rises."""
    stub.Register(registration("balancer"))
    watched = iter(stub.Watch(pb.WatchRequest(knows_left=True), timeout=PATIENCE_S))
    former = MembershipFold()
    former.take(next(watched), 0.0)
    stub.Register(registration("frontend-0", Role.FRONTEND))
    arrives = next(watched)
    stub.Deregister(pb.DeregisterRequest(id="frontend-0", incarnation=1))
    leaves = next(watched)
    for response in (arrives, leaves):
        assert response.event.member.role in range(1, Role.FRONTEND.number)
        former.take(response, 0.0)
        assert former.view.members.keys() == {"balancer", "monitor"}
    stub.Register(registration("frontend-1", Role.FRONTEND))
    current = MembershipFold()
    current.take(next(iter(stub.Watch(current.position, timeout=PATIENCE_S))), 0.0)
    assert [m.id for m in current.view.live(Role.FRONTEND)] == ["frontend-1"]
    again = stub.Watch(pb.WatchRequest(knows_left=True), timeout=PATIENCE_S)
    snapshot = next(iter(again)).snapshot
    assert {m.id for m in snapshot.members} == {"balancer", "monitor"}
    # Signs of life tell a watcher by its revision whether it missed something.
    former.take(next(watched), 0.0)
    assert former.view.revision == snapshot.revision


def test_a_watcher_that_does_not_read_is_sent_a_snapshot_of_what_it_missed(stub: Any) -> None:
    stub.Register(registration("busy", Role.EXPERT_SERVER))
    watched = stub.Watch(pb.WatchRequest())
    stream = iter(watched)
    first = next(stream).snapshot
    assert {m.id for m in first.members} == {"busy", "monitor"}
    # Each is an event of 80 bytes: far more than the stream's window and the history hold.
    changes = 6000
    beats = (
        pb.HeartbeatRequest(id="busy", incarnation=1, state=SERVING.number, experts=n)
        for n in range(1, changes + 1)
    )
    answers = list(stub.Heartbeat(beats))
    assert len(answers) == changes
    last = answers[-1].revision
    assert last == first.revision + changes
    kinds, seen = [], first.revision
    for response in itertools.islice(stream, changes + 1):
        kinds.append(response.WhichOneof("kind"))
        if kinds[-1] == "snapshot":
            assert response.snapshot.revision > seen
            seen = response.snapshot.revision
            found = {m.id: m for m in response.snapshot.members}["busy"].experts
        else:
            assert response.event.revision == seen + 1
            seen = response.event.revision
            found = response.event.member.experts
        if seen == last:
            break
    watched.cancel()
    assert (seen, found) == (last, changes)
    assert kinds.count("snapshot") >= 1
    assert len(kinds) < changes
