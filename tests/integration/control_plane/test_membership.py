"""Monitor and members over real gRPC."""

from __future__ import annotations

import socket
import time

import grpc
import pytest

from control_plane import (
    DEAD,
    LEFT,
    SERVING,
    Observer,
    Plane,
    eventually,
    has_state,
    port_of,
    registration,
)
from eaas.config import MonitorConfig
from eaas.errors import ClusterError
from eaas.membership.session import PROTOCOL_VERSION
from eaas.net.grpc_client import channel
from eaas.rpc.v1 import (
    monitor_pb2,
    monitor_pb2_grpc,
)
from eaas.types import MemberState, Role
from monitor.main import Monitor

pytestmark = pytest.mark.integration


def test_members_see_each_other(plane: Plane) -> None:
    monitor = plane.monitor()
    first = plane.observe(monitor.address, "first")
    second = plane.observe(monitor.address, "second")
    view = first.wait(lambda v: {"first", "second", "monitor"} <= v.members.keys())
    assert view.members["monitor"].role is Role.MONITOR
    assert view.members["monitor"].state is SERVING
    assert view.members["monitor"].address == monitor.address
    assert view.members["second"].incarnation == second.session.incarnation == 1
    second.state = MemberState.DRAINING
    second.session.report_now()
    first.wait(has_state("second", MemberState.DRAINING))
    second.session.close()
    first.wait(has_state("second", LEFT))
    second.session.close()  # Idempotent.
    third = plane.observe(monitor.address, "third")
    tombstone = third.wait(lambda v: "second" in v.members).members["second"]
    assert tombstone.state is LEFT


def test_a_silent_member_is_suspect_then_dead_and_returns_as_a_new_incarnation(
    plane: Plane,
) -> None:
    monitor = plane.monitor()
    watcher = plane.observe(monitor.address, "watcher")
    lost = plane.observe(monitor.address, "lost")
    watcher.wait(has_state("lost", SERVING))
    lost.session.close(deregister=False)
    watcher.wait(has_state("lost", DEAD))
    seen = [v.members["lost"].state for v in watcher.views if "lost" in v.members]
    assert seen.index(MemberState.SUSPECT) < seen.index(DEAD)
    again = plane.observe(monitor.address, "lost", pid=1)
    assert again.session.incarnation == 2
    view = watcher.wait(has_state("lost", SERVING))
    assert view.members["lost"].incarnation == 2
    # The watcher itself was never suspected.
    assert all(v.members["watcher"].state is SERVING for v in watcher.views)


def test_a_live_member_that_is_declared_dead_becomes_a_new_incarnation(plane: Plane) -> None:
    monitor = plane.monitor()
    member = plane.observe(monitor.address, "member")
    member.wait(has_state("member", SERVING))
    with channel(monitor.address) as line:
        monitor_pb2_grpc.MonitorServiceStub(line).Deregister(
            monitor_pb2.DeregisterRequest(id="member", incarnation=1)
        )
    member.wait(lambda v: v.members["member"].incarnation == 2)
    eventually(lambda: member.incarnations == [2])
    assert member.session.incarnation == 2


def test_an_id_is_taken_while_its_process_lives(plane: Plane) -> None:
    monitor = plane.monitor()
    plane.observe(monitor.address, "member", pid=1)
    with pytest.raises(ClusterError, match="ALREADY_EXISTS: member is process 1 on here") as caught:
        Observer(monitor.address, "member", pid=2, register_timeout_s=0.5)
    assert monitor.address in str(caught.value)


def test_no_monitor_is_an_error_that_names_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ClusterError, match=f"monitor at 127.0.0.1:{port}: UNAVAILABLE"):
        Observer(f"127.0.0.1:{port}", register_timeout_s=0.5)


def test_another_version_of_the_contract_is_refused(plane: Plane) -> None:
    monitor = plane.monitor()
    with channel(monitor.address) as line:
        stub = monitor_pb2_grpc.MonitorServiceStub(line)
        request = registration("x", protocol_version=PROTOCOL_VERSION + 1)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Register(request)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        request = monitor_pb2.RegisterRequest(protocol_version=PROTOCOL_VERSION)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Register(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.nightly
def test_a_monitor_that_was_kept_from_hearing_declares_nobody_dead(plane: Plane) -> None:
    """Its event loop is blocked for more than two leases."""
    naps: list[float] = []
    monitor = Monitor(
        MonitorConfig(lease_s=1.0, heartbeat_s=0.4),
        on_tick=lambda: time.sleep(naps.pop() if naps else 0.0),
    )
    plane.stack.callback(monitor.stop)
    observers = [plane.observe(monitor.address, f"m{i}") for i in range(4)]
    for observer in observers:
        observer.wait(lambda v: all(has_state(f"m{i}", SERVING)(v) for i in range(4)))
    naps.append(3.5)
    time.sleep(5.0)
    observers[3].session.close()
    for observer in observers[:3]:
        observer.wait(has_state("m3", LEFT))
        assert not any(has_state(f"m{i}", DEAD)(v) for v in observer.views for i in range(3))
        assert observer.session.incarnation == 1


def test_nobody_takes_the_place_of_the_monitor(plane: Plane) -> None:
    """Not even from the same process on the same host: it would replace the monitor's own member."""
    monitor = plane.monitor()
    observer = plane.observe(monitor.address)
    own = observer.wait(lambda v: "monitor" in v.members).members["monitor"]
    with channel(monitor.address) as line:
        stub = monitor_pb2_grpc.MonitorServiceStub(line)
        for previous in (0, own.incarnation):
            request = registration("monitor", member=own.to_proto(), previous_incarnation=previous)
            with pytest.raises(grpc.RpcError, match="monitor is this monitor") as caught:
                stub.Register(request)
            assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        with pytest.raises(grpc.RpcError, match="the monitor cannot be deregistered"):
            stub.Deregister(monitor_pb2.DeregisterRequest(id="monitor", incarnation=1))
    # It still detects silent members.
    lost = plane.observe(monitor.address, "lost")
    observer.wait(has_state("lost", SERVING))
    lost.session.close(deregister=False)
    observer.wait(has_state("lost", DEAD))


def test_the_session_outlives_the_monitor(plane: Plane) -> None:
    first = Monitor(MonitorConfig())
    a, b = plane.observe(first.address, "a"), plane.observe(first.address, "b")
    for observer in (a, b):
        observer.wait(lambda v: {"a", "b"} <= v.members.keys())
        observer.wait(has_state("a", SERVING))
        observer.wait(has_state("b", SERVING))
    first.stop()
    eventually(lambda: a.session.view.age_s(time.monotonic()) > 1.5)
    assert {"a", "b", "monitor"} <= a.session.view.members.keys()
    changes = len(a.views)
    second = plane.monitor(port=port_of(first.address))
    assert second.address == first.address
    late = plane.observe(second.address, "late")
    # The members register with the new monitor, and their view continues.
    late.wait(lambda v: {"a", "b"} <= v.members.keys())
    a.wait(lambda v: "late" in v.members and v.age_s(time.monotonic()) < 1.5)
    b.session.close()
    a.wait(has_state("b", LEFT))
    # No member was declared dead, and every incarnation continues.
    between = [v for v in a.views[changes:] if v.members["b"].state is not LEFT]
    assert all(
        v.members[name].state is SERVING and v.members[name].incarnation == 1
        for v in between
        for name in ("a", "b")
    )
    assert a.session.incarnation == 1
    assert a.incarnations == []
    assert not a.stopping.is_set()
