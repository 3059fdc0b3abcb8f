"""A member session against fake monitors."""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest

from eaas.errors import ClusterError
from eaas.membership import session as module
from eaas.membership.monitors import MonitorConnection
from eaas.membership.session import MemberSession, Report
from eaas.net.grpc_failure import CallFailure
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.types import Member, MemberState, Role

PATIENCE_S = 20.0
MEMBER = Member("m", Role.ATTENTION_CLIENT, 1, "h", "", MemberState.SERVING)


def unavailable(details: str) -> CallFailure:
    return CallFailure(grpc.StatusCode.UNAVAILABLE, details)


class Stream:
    """Yields the messages of its inbox; ends with an error or when it is cancelled."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.cancelled = threading.Event()

    def next(self, silence_s: float | None = None) -> Any:
        item = self.inbox.get(timeout=silence_s)
        if isinstance(item, Exception):
            raise item
        return item

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.next()

    def cancel(self) -> None:
        self.cancelled.set()
        self.inbox.put(CallFailure(grpc.StatusCode.CANCELLED, "cancelled"))


class Box:
    """A fake monitor; registers every member unless it has a refusal."""

    def __init__(self, heartbeat_s: float = 0.05) -> None:
        self.heartbeat_s = heartbeat_s
        self.refusals: list[CallFailure] = []
        self.registered = 0
        self.heartbeats: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self.watches: queue.SimpleQueue[tuple[pb.WatchRequest, Stream]] = queue.SimpleQueue()

    def Register(self, _request: Any, timeout: float) -> pb.RegisterResponse:
        if self.refusals:
            raise self.refusals.pop(0)
        self.registered += 1
        return pb.RegisterResponse(incarnation=1, lease_s=60.0, heartbeat_s=self.heartbeat_s)

    def Heartbeat(self, _requests: Any) -> Stream:
        self.heartbeats.put(stream := Stream())
        return stream

    def Watch(self, request: pb.WatchRequest) -> Stream:
        self.watches.put((request, stream := Stream()))
        return stream

    def Deregister(self, _request: Any, timeout: float) -> pb.DeregisterResponse:
        return pb.DeregisterResponse()


@pytest.fixture
def boxes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Box]:
    boxes = {"a:1": Box(), "b:2": Box()}
    made = MonitorConnection.__init__

    def connect(monitor: MonitorConnection, address: str, tls: None) -> None:
        made(monitor, address, tls)
        monitor.stub = boxes[address]

    monkeypatch.setattr(MonitorConnection, "__init__", connect)
    return boxes


def session(addresses: str, **callbacks: Any) -> MemberSession:
    return MemberSession(addresses, MEMBER, report=lambda: Report(MemberState.SERVING), **callbacks)


@pytest.mark.parametrize(("heartbeat_s", "told"), [(0.9, True), (2.0, True), (6.0, False)])
def test_rare_heartbeats_are_no_signs_of_life_for_the_view(
    boxes: dict[str, Box], heartbeat_s: float, told: bool
) -> None:
    """Otherwise the stream would end for its silence again and again."""
    boxes["a:1"].heartbeat_s = heartbeat_s
    member = session("a:1")
    request, _ = boxes["a:1"].watches.get(timeout=PATIENCE_S)
    member.close()
    assert request.heartbeats_tell == told


def test_leaving_a_monitor_keeps_streams_to_the_next_one(
    boxes: dict[str, Box],
) -> None:
    a, b = boxes["a:1"], boxes["b:2"]
    member = session("a:1,b:2")
    lease, (_, view) = (
        a.heartbeats.get(timeout=PATIENCE_S),
        a.watches.get(timeout=PATIENCE_S),
    )
    real_leave, at_b = member._monitors.leave, threading.Event()

    def leave(monitor: MonitorConnection, error: Exception) -> bool:
        """Let the other thread switch before this one cancels anything."""
        left = real_leave(monitor, error)
        if left:
            view.cancel()
            at_b.wait(PATIENCE_S)
        return left

    member._monitors.leave = leave  # type: ignore[method-assign]
    lease.inbox.put(unavailable("gone"))
    _, view_at_b = b.watches.get(timeout=PATIENCE_S)
    while view_at_b not in member._calls:
        time.sleep(0.001)
    at_b.set()
    lease_at_b = b.heartbeats.get(timeout=PATIENCE_S)
    assert lease.cancelled.is_set()
    assert not view_at_b.cancelled.is_set()
    assert not lease_at_b.cancelled.is_set()
    member.close()


def test_a_wait_for_silent_monitors_is_logged_once_for_each(
    boxes: dict[str, Box], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.Backoff, "next_s", lambda _: 0.001)
    boxes["a:1"].refusals = [unavailable("down")] * 2
    boxes["b:2"].refusals = [unavailable("away")] * 2
    session("a:1,b:2").close()
    waits = [r.getMessage() for r in caplog.records if "trying for 10 s" in r.getMessage()]
    assert waits == [
        f"the monitor at {at} refuses or is silent (UNAVAILABLE: {why}); trying for 10 s"
        for at, why in (("a:1", "down"), ("b:2", "away"))
    ]


def test_each_cause_of_a_failed_registration_is_logged_once(
    boxes: dict[str, Box], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.Backoff, "next_s", lambda _: 0.001)
    a = boxes["a:1"]
    member = session("a:1")
    taken = CallFailure(grpc.StatusCode.ALREADY_EXISTS, "m is process 9 on h2")
    lease = a.heartbeats.get(timeout=PATIENCE_S)
    with caplog.at_level(logging.WARNING, module.__name__):
        a.refusals = [taken, unavailable("down"), taken, unavailable("down"), taken]
        lease.inbox.put(CallFailure(grpc.StatusCode.NOT_FOUND, "register"))
        a.heartbeats.get(timeout=PATIENCE_S)
    member.close()
    told = [r.getMessage() for r in caplog.records if "not registered" in r.getMessage()]
    assert len(told) == 2
    assert "ALREADY_EXISTS: m is process 9 on h2" in told[0]
    assert "UNAVAILABLE: down" in told[1]


def test_a_replaced_process_is_notified_once(
    boxes: dict[str, Box], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown process, or one without a monitor, is not: it may continue."""
    monkeypatch.setattr(module.Backoff, "next_s", lambda _: 0.001)
    a, replaced, lives = boxes["a:1"], list[str](), list[int]()
    taken = CallFailure(grpc.StatusCode.ALREADY_EXISTS, "m is process 9 on h2")
    member = session(
        "a:1", on_replaced=lambda: replaced.append("once"), on_new_incarnation=lives.append
    )
    for refusals, calls in [([unavailable("down")], 0), ([taken, unavailable("down"), taken], 1)]:
        lease = a.heartbeats.get(timeout=PATIENCE_S)
        a.refusals = refusals
        lease.inbox.put(CallFailure(grpc.StatusCode.NOT_FOUND, "register"))
        lease = a.heartbeats.get(timeout=PATIENCE_S)
        assert len(replaced) == calls
        a.heartbeats.put(lease)
    member.close()
    assert lives == []


def test_a_final_refusal_of_the_first_registration_fails_at_once(
    boxes: dict[str, Box],
) -> None:
    boxes["a:1"].refusals = [CallFailure(grpc.StatusCode.INVALID_ARGUMENT, "a member needs an id")]
    with pytest.raises(ClusterError, match="a member needs an id"):
        session("a:1")
    assert boxes["a:1"].registered == 0


@pytest.mark.parametrize(
    ("details", "told"),
    [
        ("RegisterRequest.member.role is 5: it can be 0 to 4", True),
        ("Member.id is 'a b': it can have letters", False),
    ],
)
def test_a_frontend_is_told_that_its_monitor_is_old(
    boxes: dict[str, Box], details: str, told: bool
) -> None:
    refusal = CallFailure(grpc.StatusCode.INVALID_ARGUMENT, details)
    boxes["a:1"].refusals.append(refusal)
    frontend = replace(MEMBER, role=Role.FRONTEND)
    with pytest.raises(ClusterError, match=re.escape(details)) as caught:
        MemberSession("a:1", frontend, report=lambda: Report(MemberState.SERVING))
    assert ("upgrade the monitor first" in str(caught.value)) == told
