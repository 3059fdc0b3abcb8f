"""A malicious monitor: members ignore its impossible values, and none of them ends or grows."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from balancer.main import Balancer
from control_plane import PATIENCE_S, Observer, eventually
from eaas.config import BalancerConfig
from eaas.errors import ClusterError
from eaas.net.grpc_server import Service, serve
from eaas.rpc.v1 import common_pb2, monitor_pb2, monitor_pb2_grpc

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SERVING = common_pb2.MEMBER_STATE_SERVING
SERVER, CLIENT = common_pb2.ROLE_EXPERT_SERVER, common_pb2.ROLE_ATTENTION_CLIENT


def member(name: str = "good", **fields: Any) -> common_pb2.Member:
    defaults = {"role": CLIENT, "state": SERVING, "pid": 1, "host": "h", "incarnation": 1}
    return common_pb2.Member(**({"id": name} | defaults | fields))


class Rogue(monitor_pb2_grpc.MonitorServiceServicer):
    """A monitor that answers what the test says.

    Args:
        watch: Makes the responses of one Watch call.
        registered: Fields of its answer to Register.
        record: The record that it claims the last balancer left.
        record_after_s: Delay of that answer, in seconds.
    """

    def __init__(
        self,
        watch: Callable[[], Iterator[monitor_pb2.WatchResponse]] = lambda: iter(()),
        registered: dict[str, Any] | None = None,
        record: bytes = b"",
        record_after_s: float = 0.0,
    ) -> None:
        self.watch, self.record, self.record_after_s = watch, record, record_after_s
        self.registered = {"incarnation": 1, "lease_s": 2.0, "heartbeat_s": 0.2}
        self.registered |= registered or {}
        self.over = threading.Event()

    def Register(self, request: Any, context: Any) -> Any:
        return monitor_pb2.RegisterResponse(**self.registered)

    def Heartbeat(self, requests: Any, context: Any) -> Any:
        for _ in requests:
            yield monitor_pb2.HeartbeatResponse(revision=2**64 - 1)

    def Watch(self, request: Any, context: Any) -> Any:
        yield from self.watch()
        while context.is_active() and not self.over.wait(0.5):
            yield monitor_pb2.WatchResponse(still_at_revision=3)

    def Deregister(self, request: Any, context: Any) -> Any:
        return monitor_pb2.DeregisterResponse()

    def GetRecord(self, request: Any, context: Any) -> Any:
        self.over.wait(self.record_after_s)
        return monitor_pb2.GetRecordResponse(data=self.record, incarnation=2**64 - 1)

    def KeepRecord(self, request: Any, context: Any) -> Any:
        return monitor_pb2.KeepRecordResponse()


@pytest.fixture
def start(cleanup: ExitStack) -> Callable[[Rogue], str]:
    def begin(rogue: Rogue) -> str:
        add = monitor_pb2_grpc.add_MonitorServiceServicer_to_server
        service = Service("eaas.rpc.v1.MonitorService", add, rogue)
        server = serve([service], "127.0.0.1", 0)
        cleanup.callback(server.stop, 0.1)
        cleanup.callback(rogue.over.set)
        return server.address

    return begin


@pytest.mark.parametrize("field", ["lease_s", "heartbeat_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e38])
def test_times_that_no_member_can_keep_are_refused(
    start: Callable[[Rogue], str], field: str, value: float
) -> None:
    address = start(Rogue(registered={field: value}))
    with pytest.raises(
        ClusterError, match=rf"{address} .*RegisterResponse\.{field} is .*it can be"
    ):
        Observer(address, "a")


def snapshot(*members: common_pb2.Member, **fields: Any) -> monitor_pb2.WatchResponse:
    fields = {"revision": 3, "life": 5} | fields
    return monitor_pb2.WatchResponse(snapshot=monitor_pb2.Snapshot(members=members, **fields))


def event(message: common_pb2.Member, revision: int = 4) -> monitor_pb2.WatchResponse:
    return monitor_pb2.WatchResponse(
        event=monitor_pb2.MemberEvent(revision=revision, member=message)
    )


HUGE = common_pb2.ModelShape(
    num_experts=65_536, hidden_size=8, top_k=1, layer_names=["l"] * 4096, digest="d"
)
ODD = {
    "an epoch": event(member("odd", epoch=2**64 - 1)),
    "an incarnation": event(member("odd", incarnation=2**64 - 1)),
    "a name": event(member("<script>")),
    "no name": event(member("")),
    "a pid": event(member("odd", pid=-1)),
    "an address": event(member("odd", address="unix:/run/docker.sock")),
    "a speed": event(member("odd", speed=math.nan)),
    "a load": event(member("odd", busy_s=-math.inf)),
    "a role": event(member("odd", role=77)),
    "a state": event(member("odd", state=77)),
    "a model": event(member("odd", role=SERVER, model=HUGE)),
    "a revision": event(member("odd"), revision=2**64 - 1),
    "a life": snapshot(life=2**64 - 1),
    "a crowd": snapshot(*(member(f"m{i}") for i in range(70_000))),
    "a position": monitor_pb2.WatchResponse(still_at_revision=2**64 - 1),
}


@pytest.mark.parametrize("what", ODD)
def test_impossible_values_change_no_view(
    start: Callable[[Rogue], str], cleanup: ExitStack, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    address = start(Rogue(lambda: iter([snapshot(member()), ODD[what]])))
    observer = Observer(address, "a")
    cleanup.callback(observer.session.close)
    observer.wait(lambda view: "good" in view.members)
    eventually(lambda: "sends an invalid message" in caplog.text)
    assert {id_ for view in observer.views for id_ in view.members} == {"good"}
    assert "Traceback" not in caplog.text


def test_endless_events_take_no_memory(start: Callable[[Rogue], str], cleanup: ExitStack) -> None:
    """Events that come faster than the view takes them wait at their sender."""
    padding = "x" * 200

    def flood() -> Iterator[monitor_pb2.WatchResponse]:
        yield snapshot(member())
        for i in itertools.count(4):
            yield event(member(f"m{i % 50}", node=f"{i}-{padding}"), revision=i)

    observer = Observer(start(Rogue(flood)), "a")
    cleanup.callback(observer.session.close)
    observer.wait(lambda view: len(view.members) > 50)
    # The test itself must not keep the views.
    observer.session._on_change = lambda view: time.sleep(0.001)
    before, until = resident(), time.monotonic() + 3.0
    while time.monotonic() < until:
        time.sleep(0.2)
        assert resident() - before < 64 << 20
    assert "good" in observer.session.view.members


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# A late record comes after the view that names the balancer.
@pytest.mark.parametrize("record_after_s", [0.0, 0.5])
@pytest.mark.parametrize("record", [b"\xff" * 500, b"\x0a\x0a\x08" + b"\xff" * 9 + b"\x01"])
def test_a_balancer_ends_with_one_clear_error(
    start: Callable[[Rogue], str],
    cleanup: ExitStack,
    caplog: pytest.LogCaptureFixture,
    record: bytes,
    record_after_s: float,
) -> None:
    """Unreachable servers, servers that left, and the largest credible epochs."""
    shape = common_pb2.ModelShape(
        num_experts=8, hidden_size=8, top_k=2, layer_names=["l0"], dtype="float32", digest="d"
    )
    claimed = threading.Event()

    def told() -> Iterator[monitor_pb2.WatchResponse]:
        yield snapshot(member())
        servers = [
            member(f"s{i}", role=SERVER, address="127.0.0.1:1", model=shape, epoch=2**53 - 1)
            for i in range(3)
        ]
        for revision, one in enumerate(servers, 4):
            yield event(one, revision)
        gone = member("s0", role=SERVER, state=common_pb2.MEMBER_STATE_LEFT, model=shape)
        yield event(gone, 7)
        if not record_after_s:
            # A replaced balancer no longer asks servers.
            assert claimed.wait(PATIENCE_S)
        yield event(member("balancer", role=common_pb2.ROLE_BALANCER, incarnation=2**53 - 1), 8)

    balancer = Balancer(
        BalancerConfig(expected_servers=2, redundancy=1),
        start(Rogue(told, record=record, record_after_s=record_after_s)),
        on_stopping=lambda: None,
    )
    cleanup.callback(balancer.stop)
    deadline = time.monotonic() + PATIENCE_S
    while balancer.failure is None:
        assert time.monotonic() < deadline, caplog.text
        if "claims epoch 9007199254740991" in caplog.text:
            claimed.set()
        time.sleep(0.05)
    # It believes that it was replaced, as it must: one clear error, no crash.
    assert isinstance(balancer.failure, ClusterError)
    assert "cannot be read" in caplog.text
    assert "Traceback" not in caplog.text
