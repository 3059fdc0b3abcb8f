"""The monitor's service, without a gRPC server."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from typing import Any

import grpc
import pytest

from eaas.membership.session import PROTOCOL_VERSION
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.types import Member, MemberState, Role
from monitor.fanout import Fanout
from monitor.refusal import Refused
from monitor.service import MonitorService
from monitor.store import Change, Kept

LEASE_S, HEARTBEAT_S = 2.0, 0.9
PATIENCE_S = 30.0


class Call:
    """A call's context; has the caller's requests, and records the messages."""

    def __init__(self, *requests: Any) -> None:
        self._requests = list(requests)
        self.told: list[pb.WatchResponse] = []

    async def read(self) -> Any:
        return self._requests.pop(0) if self._requests else grpc.aio.EOF

    def auth_context(self) -> dict[str, Any]:
        """Plain text."""
        return {}

    async def write(self, message: bytes) -> None:
        self.told.append(pb.WatchResponse.FromString(message))


class SlowStore:
    """A store that completes a write when the test allows it."""

    leads_until = math.inf

    def __init__(self) -> None:
        self.kept = Kept(5)
        self.go = threading.Event()

    def write(self, change: Change) -> None:
        assert self.go.wait(PATIENCE_S)

    def close(self) -> None:
        """Nothing to release."""


def member(member_id: str, role: Role = Role.EXPERT_SERVER) -> Member:
    return Member(member_id, role, 1, "h", "a:1", MemberState.SERVING)


@pytest.mark.parametrize("heartbeats_tell", [False, True])
def test_a_watcher_waits_until_the_first_snapshot_is_stored(heartbeats_tell: bool) -> None:
    store, call = SlowStore(), Call()

    async def scenario() -> None:
        service = MonitorService(LEASE_S, HEARTBEAT_S, asyncio.get_running_loop(), store=store)
        service.register_self(member("monitor", Role.MONITOR))
        request = pb.WatchRequest(heartbeats_tell=heartbeats_tell)
        watching = asyncio.create_task(service.Watch(request, call))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not watching.done()
        assert call.told == []
        store.go.set()
        async with asyncio.timeout(PATIENCE_S):
            while not call.told:
                await asyncio.sleep(0.01)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await asyncio.to_thread(service.end)

    asyncio.run(scenario())
    (told,) = call.told
    assert [m.id for m in told.snapshot.members] == ["monitor"]


def register(service: MonitorService, message: Any) -> None:
    request = pb.RegisterRequest(member=message, protocol_version=PROTOCOL_VERSION)
    asyncio.run(service.Register(request, Call()))


@pytest.fixture
def service() -> MonitorService:
    loop = asyncio.new_event_loop()
    loop.close()
    return MonitorService(LEASE_S, HEARTBEAT_S, loop)


def test_a_bug_of_the_monitor_is_not_reported_as_the_callers(
    service: MonitorService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(_fanout: Fanout) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(Fanout, "notify", wrong)
    with pytest.raises(ValueError, match="a bug"):
        register(service, member("a").to_proto())


def test_no_process_reports_for_the_monitor() -> None:
    async def scenario() -> None:
        service = MonitorService(LEASE_S, HEARTBEAT_S, asyncio.get_running_loop())
        service.register_self(member("monitor", Role.MONITOR))
        state = MemberState.DRAINING.number
        call = Call(pb.HeartbeatRequest(id="monitor", incarnation=1, state=state))
        with pytest.raises(Refused, match="no other process may report for the monitor") as caught:
            await service.Heartbeat(None, call)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(scenario())


def test_a_member_that_cannot_be_kept_is_refused(service: MonitorService) -> None:
    wrong, big = member("a").to_proto(), member("a").to_proto()
    wrong.role = 99  # type: ignore[assignment]
    # Written to ZooKeeper, it would end the session of every leader that tries.
    big.address = "a" * (64 << 10)
    for message, why in ((wrong, "unknown role 99"), (big, "bytes at most")):
        with pytest.raises(Refused, match=why) as caught:
            register(service, message)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_a_stopping_cluster_is_over_as_soon_as_all_have_left() -> None:
    async def scenario() -> float:
        service = MonitorService(LEASE_S, HEARTBEAT_S, asyncio.get_running_loop())
        service.register_self(member("monitor", Role.MONITOR))
        request = pb.RegisterRequest(
            member=member("a").to_proto(), protocol_version=PROTOCOL_VERSION
        )
        life = await service.Register(request, Call())
        began = time.monotonic()
        stopping = asyncio.create_task(asyncio.to_thread(service.announce_stop, PATIENCE_S))
        # By now it waits, or will check before it waits.
        await asyncio.sleep(0.1)
        goodbye = pb.DeregisterRequest(id="a", incarnation=life.incarnation)
        await service.Deregister(goodbye, Call())
        await stopping
        return time.monotonic() - began

    assert asyncio.run(scenario()) < PATIENCE_S / 2
