"""Monitor and members over real gRPC."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import grpc
import pytest

from control_plane import (
    DEAD,
    LEFT,
    PATIENCE_S,
    SERVING,
    Observer,
    eventually,
    has_state,
    port_of,
)
from eaas.config import MonitorConfig
from eaas.errors import ClusterError
from eaas.membership.session import PROTOCOL_VERSION
from eaas.net.grpc_client import channel
from eaas.rpc.v1 import (
    monitor_pb2,
    monitor_pb2_grpc,
)
from eaas.types import Member, MemberState, Role
from monitor.main import Monitor

pytestmark = pytest.mark.integration


def test_members_see_each_other(
    start_monitor: Callable[..., Monitor], observe: Callable[..., Observer]
) -> None:
    monitor = start_monitor()
    first = observe(monitor.address, "first")
    second = observe(monitor.address, "second")
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
    third = observe(monitor.address, "third")
    tombstone = third.wait(lambda v: "second" in v.members).members["second"]
    assert tombstone.state is LEFT


def test_a_silent_member_is_suspect_then_dead_and_returns_as_a_new_incarnation(
    start_monitor: Callable[..., Monitor], observe: Callable[..., Observer]
) -> None:
    monitor = start_monitor()
    watcher = observe(monitor.address, "watcher")
    lost = observe(monitor.address, "lost")
    watcher.wait(has_state("lost", SERVING))
    lost.session.close(deregister=False)
    watcher.wait(has_state("lost", DEAD))
    seen = [v.members["lost"].state for v in watcher.views if "lost" in v.members]
    assert seen.index(MemberState.SUSPECT) < seen.index(DEAD)
    again = observe(monitor.address, "lost", pid=1)
    assert again.session.incarnation == 2
    view = watcher.wait(has_state("lost", SERVING))
    assert view.members["lost"].incarnation == 2
    # The watcher itself was never suspected.
    assert all(v.members["watcher"].state is SERVING for v in watcher.views)


def test_a_live_member_that_is_declared_dead_becomes_a_new_incarnation(
    start_monitor: Callable[..., Monitor], observe: Callable[..., Observer]
) -> None:
    monitor = start_monitor()
    member = observe(monitor.address, "member")
    member.wait(has_state("member", SERVING))
    with channel(monitor.address) as line:
        monitor_pb2_grpc.MonitorServiceStub(line).Deregister(
            monitor_pb2.DeregisterRequest(id="member", incarnation=1)
        )
    member.wait(lambda v: v.members["member"].incarnation == 2)
    eventually(lambda: member.incarnations == [2])
    assert member.session.incarnation == 2


def test_an_id_is_taken_while_its_process_lives(
    start_monitor: Callable[..., Monitor], observe: Callable[..., Observer]
) -> None:
    monitor = start_monitor()
    observe(monitor.address, "member", pid=1)
    with pytest.raises(ClusterError, match="ALREADY_EXISTS: member is process 1 on here") as caught:
        Observer(monitor.address, "member", pid=2, register_timeout_s=0.5)
    assert monitor.address in str(caught.value)


def test_no_monitor_is_an_error_that_names_the_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ClusterError, match=f"monitor at 127.0.0.1:{port}: UNAVAILABLE"):
        Observer(f"127.0.0.1:{port}", register_timeout_s=0.5)


def test_another_version_of_the_contract_is_refused(start_monitor: Callable[..., Monitor]) -> None:
    monitor = start_monitor()
    member = Member("x", Role.BALANCER, 1, "h", "", SERVING)
    with channel(monitor.address) as line:
        stub = monitor_pb2_grpc.MonitorServiceStub(line)
        request = monitor_pb2.RegisterRequest(
            member=member.to_proto(), protocol_version=PROTOCOL_VERSION + 1
        )
        with pytest.raises(grpc.RpcError) as caught:
            stub.Register(request)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        request = monitor_pb2.RegisterRequest(protocol_version=PROTOCOL_VERSION)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Register(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.nightly
def test_a_monitor_that_was_kept_from_hearing_declares_nobody_dead(
    start_monitor: Callable[..., Monitor], observe: Callable[..., Observer]
) -> None:
    """Its event loop is blocked for more than two leases."""
    monitor = start_monitor(lease_s=1.0, heartbeat_s=0.4)
    observers = [observe(monitor.address, f"m{i}") for i in range(4)]
    for observer in observers:
        observer.wait(lambda v: all(has_state(f"m{i}", SERVING)(v) for i in range(4)))
    monitor._server.loop.call_soon_threadsafe(time.sleep, 3.5)
    time.sleep(5.0)
    observers[3].session.close()
    for observer in observers[:3]:
        observer.wait(has_state("m3", LEFT))
        assert not any(has_state(f"m{i}", DEAD)(v) for v in observer.views for i in range(3))
        assert observer.session.incarnation == 1


def test_nobody_takes_the_place_of_the_monitor(
    start_monitor: Callable[..., Monitor], observe: Callable[..., Observer]
) -> None:
    """Not even from the same process on the same host: it would replace the monitor's own member."""
    monitor = start_monitor()
    observer = observe(monitor.address)
    own = observer.wait(lambda v: "monitor" in v.members).members["monitor"]
    with channel(monitor.address) as line:
        stub = monitor_pb2_grpc.MonitorServiceStub(line)
        for previous in (0, own.incarnation):
            request = monitor_pb2.RegisterRequest(
                member=own.to_proto(),
                protocol_version=PROTOCOL_VERSION,
                previous_incarnation=previous,
            )
            with pytest.raises(grpc.RpcError, match="monitor is this monitor") as caught:
                stub.Register(request)
            assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        with pytest.raises(grpc.RpcError, match="the monitor cannot be deregistered"):
            stub.Deregister(monitor_pb2.DeregisterRequest(id="monitor", incarnation=1))
    # It still detects silent members.
    lost = observe(monitor.address, "lost")
    observer.wait(has_state("lost", SERVING))
    lost.session.close(deregister=False)
    observer.wait(has_state("lost", DEAD))


def test_the_session_outlives_the_monitor(
    start_monitor: Callable[..., Monitor], observe: Callable[..., Observer]
) -> None:
    first = Monitor(MonitorConfig())
    a, b = observe(first.address, "a"), observe(first.address, "b")
    for observer in (a, b):
        observer.wait(lambda v: {"a", "b"} <= v.members.keys())
        observer.wait(has_state("a", SERVING))
        observer.wait(has_state("b", SERVING))
    first.stop()
    eventually(lambda: a.session.view.age_s(time.monotonic()) > 1.5)
    assert {"a", "b", "monitor"} <= a.session.view.members.keys()
    changes = len(a.views)
    second = start_monitor(port=port_of(first.address))
    assert second.address == first.address
    late = observe(second.address, "late")
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


def test_watchers_that_leave_are_forgotten(start_monitor: Callable[..., Monitor]) -> None:
    monitor = start_monitor()
    before = threading.active_count()
    for _ in range(20):
        session = Observer(monitor.address).session
        assert session.wait_for(lambda v: "observer" in v.members, PATIENCE_S)
        session.close()
    eventually(lambda: monitor._service._watchers == 0)
    # The pool keeps some idle workers, but does not grow with the number of past watchers.
    eventually(lambda: threading.active_count() <= before + 8)


def test_members_are_told_to_stop(observe: Callable[..., Observer]) -> None:
    monitor = Monitor(MonitorConfig(stop_members_on_exit=True))
    observers = [observe(monitor.address, f"m{i}") for i in range(3)]
    for observer in observers:
        observer.wait(lambda v: "m2" in v.members)
    monitor.stop()
    for observer in observers:
        assert observer.stopping.wait(PATIENCE_S)


def test_the_end_of_a_monitor_alone_stops_nobody(observe: Callable[..., Observer]) -> None:
    monitor = Monitor(MonitorConfig())
    observer = observe(monitor.address)
    observer.wait(lambda v: "observer" in v.members)
    monitor.stop()
    assert not observer.stopping.wait(0.5)
