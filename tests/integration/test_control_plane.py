"""Monitor, balancer and members over real gRPC, with expert servers that only pretend to load."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from balancer.main import Balancer
from eaas.config import BalancerConfig, MonitorConfig
from eaas.errors import ClusterError, ConfigError, PortInUseError
from eaas.grpc_client import channel
from eaas.grpc_server import RunningServer, Service, serve
from eaas.rpc.v1 import (
    balancer_pb2,
    balancer_pb2_grpc,
    expert_pb2,
    expert_pb2_grpc,
    monitor_pb2,
    monitor_pb2_grpc,
)
from eaas.session import PROTOCOL_VERSION, MemberSession, MembershipView, PlacementWatch, Report
from eaas.types import Member, MemberState, ModelShape, Placement, Role
from monitor.main import Monitor

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SHAPE = ModelShape("tiny", 8, 64, 2, ("l0", "l1", "l2"), "float32", "digest-a")
JOINING, SERVING, DEAD = MemberState.JOINING, MemberState.SERVING, MemberState.DEAD
# Long against the scheduling of a busy machine; what is waited for takes a fraction of it.
PATIENCE_S = 40.0


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.02)


def has_state(member_id: str, state: MemberState) -> Callable[[MembershipView], bool]:
    return lambda view: member_id in view.members and view.members[member_id].state is state


class Observer:
    """A member that keeps what it was told."""

    def __init__(self, monitor_address: str, member_id: str = "observer", **kwargs: Any) -> None:
        self.state = SERVING
        self.views: list[MembershipView] = []
        self.incarnations: list[int] = []
        self.stopping = threading.Event()
        # Each observer is a process of its own to the monitor.
        pid = kwargs.pop("pid", os.getpid())
        self.session = MemberSession(
            monitor_address,
            Member(member_id, Role.ATTENTION_CLIENT, pid, "here", "", JOINING),
            report=lambda: Report(self.state, in_flight=3),
            on_change=self.views.append,
            on_stopping=self.stopping.set,
            on_new_incarnation=self.incarnations.append,
            **kwargs,
        )

    def wait(self, wanted: Callable[[MembershipView], bool]) -> MembershipView:
        view = self.session.wait_for(wanted, PATIENCE_S)
        assert view is not None, self.session.view
        return view


class FakeExpertServer:
    """Registers as an expert server and answers ApplyPlacement; loads nothing."""

    def __init__(
        self, monitor_address: str, name: str, shape: ModelShape = SHAPE, failures: int = 0
    ) -> None:
        self.state = JOINING
        self.epoch = 0
        self.requests: list[expert_pb2.ApplyPlacementRequest] = []
        self.failures = failures
        self.released = threading.Event()
        self.released.set()
        self.server: RunningServer = serve(
            [
                Service(
                    "eaas.rpc.v1.ExpertService",
                    expert_pb2_grpc.add_ExpertServiceServicer_to_server,
                    self,
                )
            ],
            "127.0.0.1",
            0,
        )
        self.session = MemberSession(
            monitor_address,
            Member(
                name,
                Role.EXPERT_SERVER,
                os.getpid(),
                "here",
                self.server.address,
                JOINING,
                model=shape,
            ),
            report=lambda: Report(self.state, experts=self.experts, epoch=self.epoch),
        )

    @property
    def experts(self) -> int:
        return sum(len(layer.experts) for layer in self.requests[-1].layers) if self.epoch else 0

    def ApplyPlacement(
        self, request: expert_pb2.ApplyPlacementRequest, context: Any
    ) -> expert_pb2.ApplyPlacementResponse:
        self.requests.append(request)
        self.released.wait(PATIENCE_S)
        if len(self.requests) <= self.failures:
            context.abort(grpc.StatusCode.DATA_LOSS, "the shard cannot be read")
        self.epoch = request.epoch
        self.state = SERVING
        self.session.report_now()
        return expert_pb2.ApplyPlacementResponse(epoch=self.epoch, experts=self.experts)

    def _unused(self, request: Any, context: Any) -> None:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not in this test")

    Connect = Disconnect = Exchange = Join = _unused

    def close(self, deregister: bool = True) -> None:
        self.session.close(deregister)
        self.server.stop(0)


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start_monitor(cleanup: ExitStack) -> Callable[..., Monitor]:
    def start(**fields: Any) -> Monitor:
        monitor = Monitor(MonitorConfig(**fields))
        cleanup.callback(monitor.stop)
        return monitor

    return start


@pytest.fixture
def observe(cleanup: ExitStack) -> Callable[..., Observer]:
    def start(address: str, member_id: str = "observer", **kwargs: Any) -> Observer:
        observer = Observer(address, member_id, **kwargs)
        cleanup.callback(observer.session.close)
        return observer

    return start


def port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


# -- membership ------------------------------------------------------------------------------------


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
    first.wait(has_state("second", DEAD))
    second.session.close()  # Idempotent.
    third = observe(monitor.address, "third")
    tombstone = third.wait(lambda v: "second" in v.members).members["second"]
    assert tombstone.state is DEAD


def test_a_member_that_vanishes_is_suspect_then_dead_and_a_new_life_when_it_returns(
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
    # The watcher itself has been alive all the time.
    assert all(v.members["watcher"].state is SERVING for v in watcher.views)


def test_a_live_member_that_is_declared_dead_begins_a_new_life(
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
    # The new monitor hears of them itself, and their view goes on.
    late.wait(lambda v: {"a", "b"} <= v.members.keys())
    a.wait(lambda v: "late" in v.members and v.age_s(time.monotonic()) < 1.5)
    b.session.close()
    a.wait(has_state("b", DEAD))
    # Nobody was taken for dead meanwhile, and nobody's life ended.
    between = [v for v in a.views[changes:] if v.members["b"].state is not DEAD]
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
    # The pool keeps a few idle workers; it does not grow with the number of past watchers.
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


def test_a_taken_port_and_a_short_lease_are_errors(start_monitor: Callable[..., Monitor]) -> None:
    monitor = start_monitor()
    with pytest.raises(PortInUseError, match=monitor.address):
        Monitor(MonitorConfig(port=port_of(monitor.address)))
    with pytest.raises(ConfigError, match="heartbeat_s"):
        Monitor(MonitorConfig(lease_s=1.0, heartbeat_s=0.5))


def test_sixty_four_members(start_monitor: Callable[..., Monitor], cleanup: ExitStack) -> None:
    monitor = start_monitor()
    sessions = []
    for i in range(64):
        sessions.append(Observer(monitor.address, f"m{i}").session)
        cleanup.callback(sessions[-1].close, False)
    for session in sessions:
        assert session.wait_for(
            lambda v: sum(m.state is SERVING for m in v.members.values()) == 65, PATIENCE_S
        )


# -- placement -------------------------------------------------------------------------------------


@pytest.fixture
def start_balancer(cleanup: ExitStack) -> Callable[..., Balancer]:
    def start(address: str, **fields: Any) -> Balancer:
        config = BalancerConfig(**({"expected_servers": 2, "redundancy": 2} | fields))
        balancer = Balancer(config, address, on_stopping=lambda: None)
        cleanup.callback(balancer.stop)
        return balancer

    return start


@pytest.fixture
def start_server(cleanup: ExitStack) -> Callable[..., FakeExpertServer]:
    def start(address: str, name: str, **kwargs: Any) -> FakeExpertServer:
        server = FakeExpertServer(address, name, **kwargs)
        cleanup.callback(server.close)
        return server

    return start


def follow(observer: Observer, cleanup: ExitStack) -> tuple[PlacementWatch, list[Placement]]:
    placements: list[Placement] = []

    def address() -> str | None:
        balancers = observer.session.view.live(Role.BALANCER)
        return balancers[0].address if balancers else None

    watch = PlacementWatch(address, placements.append)
    cleanup.callback(watch.close)
    return watch, placements


def test_from_nothing_to_a_placement_and_back_from_a_loss(
    start_monitor: Callable[..., Monitor],
    start_balancer: Callable[..., Balancer],
    start_server: Callable[..., FakeExpertServer],
    observe: Callable[..., Observer],
    cleanup: ExitStack,
) -> None:
    address = start_monitor().address
    observer = observe(address)
    _, placements = follow(observer, cleanup)
    balancer = start_balancer(address)
    first = start_server(address, "s1")
    observer.wait(has_state("s1", JOINING))
    assert placements == []
    with channel(balancer.address) as line:
        stub = balancer_pb2_grpc.BalancerServiceStub(line)
        assert stub.GetPlacement(balancer_pb2.GetPlacementRequest()).placement.epoch == 0
        second = start_server(address, "s2", failures=2)
        eventually(lambda: placements)
        assert (
            stub.GetPlacement(balancer_pb2.GetPlacementRequest()).placement
            == placements[0].to_proto()
        )
    (placement,) = placements
    assert (placement.epoch, placement.servers) == (1, ("s1", "s2"))
    assert len(second.requests) == 3  # The two failures were tried again.
    for server in (first, second):
        view = observer.wait(has_state(server_id(server), SERVING))
        assert view.members[server_id(server)].experts == 3 * 8
        layers = server.requests[-1].layers
        assert [list(layer.experts) for layer in layers] == [list(range(8))] * 3
        assert [list(layer.shares) for layer in layers] == [[0.5] * 8] * 3

    # A server that is not placed is told to hold nothing.
    third = start_server(address, "s3")
    observer.wait(has_state("s3", SERVING))
    assert [list(layer.experts) for layer in third.requests[-1].layers] == [[], [], []]

    # A placed one that returns gets its share again, in the same epoch.
    second.close()
    observer.wait(has_state("s2", DEAD))
    back = start_server(address, "s2")
    view = observer.wait(has_state("s2", SERVING))
    assert view.members["s2"].incarnation == 2
    assert back.requests[-1].epoch == 1
    assert len(back.requests[-1].layers[0].experts) == 8
    assert len(placements) == 1


def server_id(server: FakeExpertServer) -> str:
    return server.session._member.id


def test_an_odd_server_gets_nothing(
    start_monitor: Callable[..., Monitor],
    start_balancer: Callable[..., Balancer],
    start_server: Callable[..., FakeExpertServer],
    observe: Callable[..., Observer],
    cleanup: ExitStack,
    caplog: pytest.LogCaptureFixture,
) -> None:
    address = start_monitor().address
    _, placements = follow(observe(address), cleanup)
    other = ModelShape("tiny", 8, 64, 2, ("l0",), "float32", "digest-b")
    odd = start_server(address, "odd", shape=other)
    start_server(address, "s1")
    start_balancer(address)
    start_server(address, "s2")
    eventually(lambda: placements)
    assert placements[0].servers == ("s1", "s2")
    assert odd.requests == []
    assert any("odd gets no experts" in line and "digest-b" in line for line in caplog.messages)


def test_placements_outlive_the_balancer(
    start_monitor: Callable[..., Monitor],
    start_balancer: Callable[..., Balancer],
    start_server: Callable[..., FakeExpertServer],
    observe: Callable[..., Observer],
    cleanup: ExitStack,
) -> None:
    address = start_monitor().address
    observer = observe(address)
    watch, placements = follow(observer, cleanup)
    first = Balancer(
        BalancerConfig(expected_servers=2, redundancy=1), address, on_stopping=lambda: None
    )
    servers = [start_server(address, name) for name in ("s1", "s2")]
    eventually(lambda: placements)
    first.stop()
    observer.wait(has_state("balancer", DEAD))
    assert watch.epoch == 1
    # Another port, another life: its epoch is above what the servers hold.
    start_balancer(address, redundancy=1)
    eventually(lambda: len(placements) == 2)
    assert placements[1].epoch == 2
    assert (placements[1].holds_LSE == placements[0].holds_LSE).all()
    assert [server.epoch for server in servers] == [2, 2]


def test_a_server_that_hangs_does_not_keep_the_balancer_from_ending(
    start_monitor: Callable[..., Monitor], start_server: Callable[..., FakeExpertServer]
) -> None:
    address = start_monitor().address
    server = start_server(address, "s1")
    server.released.clear()
    balancer = Balancer(
        BalancerConfig(expected_servers=1, redundancy=1, apply_timeout_s=3600.0),
        address,
        on_stopping=lambda: None,
    )
    eventually(lambda: server.requests)
    started = time.monotonic()
    balancer.stop()
    assert time.monotonic() - started < PATIENCE_S / 2
    server.released.set()


def test_wrong_balancer_settings_and_no_monitor(start_monitor: Callable[..., Monitor]) -> None:
    monitor = start_monitor()
    with pytest.raises(ConfigError, match="redundancy 3 is above expected_servers 2"):
        Balancer(BalancerConfig(expected_servers=2, redundancy=3), monitor.address, lambda: None)
    with pytest.raises(PortInUseError):
        Balancer(BalancerConfig(port=port_of(monitor.address)), monitor.address, lambda: None)


# -- processes -------------------------------------------------------------------------------------

MONITOR = """
from eaas.config import MonitorConfig
from monitor import run
run(MonitorConfig(stop_members_on_exit=True), lambda address: print(address, flush=True))
"""
BALANCER = """
import sys
from balancer import run
from eaas.config import BalancerConfig
run(BalancerConfig(), sys.argv[1], lambda address: print(address, flush=True))
"""


def start_process(cleanup: ExitStack, code: str, *args: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, *args], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    cleanup.enter_context(process)
    cleanup.callback(process.kill)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_health_of_the_processes_and_their_end(
    cleanup: ExitStack, observe: Callable[..., Observer]
) -> None:
    monitor, monitor_address = start_process(cleanup, MONITOR)
    balancer, balancer_address = start_process(cleanup, BALANCER, monitor_address)
    services = {
        monitor_address: "eaas.rpc.v1.MonitorService",
        balancer_address: "eaas.rpc.v1.BalancerService",
    }
    for address, service in services.items():
        with channel(address) as line:
            stub = health_pb2_grpc.HealthStub(line)
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    observer = observe(monitor_address)
    observer.wait(has_state("balancer", SERVING))
    monitor.send_signal(signal.SIGTERM)
    assert monitor.wait(PATIENCE_S) == 0
    assert balancer.wait(PATIENCE_S) == 0
    assert observer.stopping.wait(PATIENCE_S)


def test_sigterm_ends_a_balancer_with_a_goodbye(
    cleanup: ExitStack, start_monitor: Callable[..., Monitor], observe: Callable[..., Observer]
) -> None:
    monitor = start_monitor(lease_s=60.0)
    observer = observe(monitor.address)
    balancer, _ = start_process(cleanup, BALANCER, monitor.address)
    observer.wait(has_state("balancer", SERVING))
    balancer.send_signal(signal.SIGTERM)
    assert balancer.wait(PATIENCE_S) == 0
    observer.wait(has_state("balancer", DEAD))


def test_a_paused_monitor_process_declares_nobody_dead(
    cleanup: ExitStack, observe: Callable[..., Observer]
) -> None:
    """10: monitor paused 10 s: on waking it declares no healthy member dead."""
    monitor, address = start_process(cleanup, MONITOR)
    a, b = observe(address, "a"), observe(address, "b")
    a.wait(has_state("b", SERVING))
    monitor.send_signal(signal.SIGSTOP)
    eventually(lambda: a.session.view.age_s(time.monotonic()) > 6.0)
    monitor.send_signal(signal.SIGCONT)
    a.wait(lambda v: v.age_s(time.monotonic()) < 1.0)
    late = observe(address, "late")
    a.wait(lambda v: "late" in v.members)
    for observer in (a, b, late):
        assert not any(m.state is DEAD for v in observer.views for m in v.members.values())
    assert (a.session.incarnation, b.session.incarnation) == (1, 1)
