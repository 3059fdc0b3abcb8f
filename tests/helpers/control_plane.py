"""Members and fake expert servers over real gRPC."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from balancer.main import Balancer
from eaas.config import BalancerConfig, MonitorConfig
from eaas.membership.session import PROTOCOL_VERSION, MemberSession, MembershipView, Report
from eaas.net.grpc_client import channel
from eaas.net.grpc_server import RunningServer, Service, serve
from eaas.net.tls import Identity
from eaas.rpc.v1 import (
    common_pb2,
    expert_pb2,
    expert_pb2_grpc,
    monitor_pb2,
    monitor_pb2_grpc,
)
from eaas.types import Member, MemberState, ModelShape, Role
from monitor.main import Monitor
from waiting import eventually

__all__ = [
    "DEAD",
    "DRAINING",
    "JOINING",
    "LEFT",
    "PATIENCE_S",
    "SERVING",
    "SHAPE",
    "FakeExpertServer",
    "MetricsServer",
    "Observer",
    "Plane",
    "Visitors",
    "check_one_history",
    "eventually",
    "has_state",
    "held_by",
    "members_at",
    "monitor_process",
    "port_of",
    "registration",
    "start_process",
]

ROOT = Path(__file__).parents[2]
SHAPE = ModelShape("tiny", 8, 64, 2, ("l0", "l1", "l2"), "float32", "digest-a")
JOINING, SERVING = MemberState.JOINING, MemberState.SERVING
DEAD, LEFT = MemberState.DEAD, MemberState.LEFT
DRAINING = MemberState.DRAINING
# Long against the scheduling of a busy machine.
PATIENCE_S = 40.0
VISIT_S = 3.0


MONITOR = """
import json, sys
from eaas.config import MonitorConfig
from monitor import run
run(MonitorConfig(**json.loads(sys.argv[1])), lambda address: print(address, flush=True))
"""


def start_process(cleanup: ExitStack, code: str, *args: str) -> tuple[subprocess.Popen[str], str]:
    """Start a program that prints its address first; it is killed with the test."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *args], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    cleanup.enter_context(process)
    cleanup.callback(process.kill)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def monitor_process(cleanup: ExitStack, **fields: Any) -> tuple[subprocess.Popen[str], str]:
    """Start a monitor with these settings; return it and its address."""
    return start_process(cleanup, MONITOR, json.dumps(fields))


def has_state(member_id: str, state: MemberState) -> Callable[[MembershipView], bool]:
    return lambda view: member_id in view.members and view.members[member_id].state is state


class Observer:
    """A member that keeps every view that it was given."""

    def __init__(self, monitor_address: str, member_id: str = "observer", **kwargs: Any) -> None:
        self.state = SERVING
        self.views: list[MembershipView] = []
        self.incarnations: list[int] = []
        self.stopping = threading.Event()
        # The monitor takes each observer for another process.
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
    """Registers as an expert server and follows placements, but loads nothing.

    Attributes:
        name: Its member id.
        busy: The share of time that it reports as busy.
        tokens_LE: The tokens of each expert that it reports.
        on_read: Called before it reports them.
        sent_bytes: The network traffic that it reports.
        most: The most replicas that it ever held at once.
    """

    def __init__(
        self,
        monitor_address: str,
        name: str,
        shape: ModelShape = SHAPE,
        failures: int = 0,
        memory_bytes: int = 0,
        node: str = "",
        tls: Identity | None = None,
    ) -> None:
        self.name = name
        self.state = JOINING
        self.epoch = 0
        self.requests: list[expert_pb2.PreparePlacementRequest] = []
        self.retired: list[expert_pb2.RetirePlacementRequest] = []
        self.held: list[set[int]] = [set() for _ in shape.layer_names]
        self.failures = failures
        self.most = 0
        self.tokens_LE = np.zeros((shape.num_layers, shape.num_experts), np.int64)
        self.on_read: Callable[[], None] = lambda: None
        self.boot_id, self.sequence = secrets.randbits(62) | 1, 0
        self.busy = self._busy_s = 0.0
        self.sent_bytes = 0
        self._reported_at = time.monotonic()
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
            credentials=tls and tls.server_credentials(),
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
                memory_bytes=memory_bytes,
                expert_bytes=1000 if memory_bytes else 0,
                node=node,
            ),
            report=self._report,
            tls=tls,
        )

    def _report(self) -> Report:
        now = time.monotonic()
        self._busy_s += self.busy * (now - self._reported_at)
        self._reported_at = now
        return Report(self.state, experts=self.experts, epoch=self.epoch, busy_s=self._busy_s)

    @property
    def experts(self) -> int:
        return sum(map(len, self.held))

    def PreparePlacement(
        self, request: expert_pb2.PreparePlacementRequest, context: Any
    ) -> expert_pb2.PreparePlacementResponse:
        self.requests.append(request)
        self.released.wait(PATIENCE_S)
        if len(self.requests) <= self.failures:
            context.abort(grpc.StatusCode.DATA_LOSS, "the shard cannot be read")
        for held, layer in zip(self.held, request.layers, strict=True):
            held |= set(layer.experts)
        self.most = max(self.most, self.experts)
        self.epoch = request.epoch
        if self.state is JOINING:
            self.state = SERVING
        self.session.report_now()
        return expert_pb2.PreparePlacementResponse(epoch=self.epoch, experts=self.experts)

    def RetirePlacement(
        self, request: expert_pb2.RetirePlacementRequest, context: Any
    ) -> expert_pb2.RetirePlacementResponse:
        self.retired.append(request)
        self.epoch = request.epoch
        self.held = [set(layer.experts) for layer in request.layers]
        self.session.report_now()
        return expert_pb2.RetirePlacementResponse(experts=self.experts)

    def ListExperts(
        self, request: expert_pb2.ListExpertsRequest, context: Any
    ) -> expert_pb2.ListExpertsResponse:
        layers = [common_pb2.Holding(experts=sorted(held)) for held in self.held]
        return expert_pb2.ListExpertsResponse(epoch=self.epoch, layers=layers)

    def HoldSpares(
        self, request: expert_pb2.HoldSparesRequest, context: Any
    ) -> expert_pb2.HoldSparesResponse:
        return expert_pb2.HoldSparesResponse(layers=request.layers)

    def ReadHotness(
        self, request: expert_pb2.ReadHotnessRequest, context: Any
    ) -> expert_pb2.ReadHotnessResponse:
        self.on_read()
        self.sequence += 1
        return expert_pb2.ReadHotnessResponse(
            boot_id=self.boot_id,
            sequence=self.sequence,
            layers=[common_pb2.LayerTokens(tokens=row) for row in self.tokens_LE.tolist()],
            expert_bytes=1000,
            sent_bytes=self.sent_bytes,
        )

    def Drain(self, request: Any, context: Any) -> expert_pb2.DrainResponse:
        self.state = DRAINING
        self.session.report_now()
        return expert_pb2.DrainResponse()

    def _unused(self, request: Any, context: Any) -> None:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "not in this test")

    Connect = Disconnect = Exchange = Join = DescribeCheckpoint = ReadShard = _unused

    def close(self, deregister: bool = True) -> None:
        self.session.close(deregister)
        self.server.stop(0)


class MetricsServer:
    """An HTTP server that answers every request with what `read` returns."""

    def __init__(self, read: Callable[[], bytes]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(read())

            def log_message(self, *_: Any) -> None:
                """No log."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Plane:
    """Starts monitors, balancers and members that end with the test."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack

    def monitor(self, tls: Identity | None = None, **fields: Any) -> Monitor:
        monitor = Monitor(MonitorConfig(**fields), tls=tls)
        self.stack.callback(monitor.stop)
        return monitor

    def balancer(self, address: str, latency_target_ms: float = 0.0, **fields: Any) -> Balancer:
        config = BalancerConfig(**({"expected_servers": 2, "redundancy": 2} | fields))
        balancer = Balancer(
            config, address, on_stopping=lambda: None, latency_target_ms=latency_target_ms
        )
        self.stack.callback(balancer.stop)
        return balancer

    def server(self, address: str, name: str, **options: Any) -> FakeExpertServer:
        server = FakeExpertServer(address, name, **options)
        self.stack.callback(server.close)
        return server

    def observe(self, address: str, member_id: str = "observer", **options: Any) -> Observer:
        observer = Observer(address, member_id, **options)
        self.stack.callback(observer.session.close)
        return observer

    def client(self, address: str, endpoint: str) -> None:
        """Register an attention client that serves HTTP at `endpoint`."""
        member = Member("client", Role.ATTENTION_CLIENT, os.getpid(), "here", endpoint, SERVING)
        session = MemberSession(address, member, report=lambda: Report(SERVING))
        self.stack.callback(session.close)


def registration(
    name: str, role: Role = Role.BALANCER, **fields: Any
) -> monitor_pb2.RegisterRequest:
    """A request to register a member that serves."""
    member = Member(name, role, 1, "h", "h:1", SERVING)
    return monitor_pb2.RegisterRequest(
        **({"member": member.to_proto(), "protocol_version": PROTOCOL_VERSION} | fields)
    )


def held_by(server: Member) -> np.ndarray:
    """Experts that a live server reports to hold, bool (L, E). Raises grpc.RpcError."""
    with channel(server.address) as line:
        stub = expert_pb2_grpc.ExpertServiceStub(line)
        answer = stub.ListExperts(expert_pb2.ListExpertsRequest(), timeout=10)
    assert server.model is not None
    holds_LE = np.zeros((len(answer.layers), server.model.num_experts), bool)
    for layer, holding in enumerate(answer.layers):
        holds_LE[layer, list(holding.experts)] = True
    return holds_LE


def port_of(address: str) -> int:
    return int(address.rsplit(":", 1)[1])


def members_at(address: str) -> dict[str, common_pb2.Member]:
    with channel(address) as line:
        call = monitor_pb2_grpc.MonitorServiceStub(line).Watch(
            monitor_pb2.WatchRequest(), timeout=VISIT_S
        )
        snapshot = next(call).snapshot
        call.cancel()
    return {member.id: member for member in snapshot.members}


@dataclass(frozen=True)
class Accepted:
    """A registration that a monitor accepted."""

    asked_at: float
    answered_at: float
    address: str
    name: str
    answer: monitor_pb2.RegisterResponse


class Visitors:
    """New members that register in turn at one monitor, whether or not it leads."""

    _numbers = itertools.count()

    def __init__(self, address: str) -> None:
        self.address = address
        self.accepted: list[Accepted] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with channel(self.address) as line:
            stub = monitor_pb2_grpc.MonitorServiceStub(line)
            for number in self._numbers:
                if self._over.wait(0.02):
                    return
                name = f"visitor-{number}"
                began = time.monotonic()
                try:
                    answer = stub.Register(registration(name), timeout=VISIT_S)
                except grpc.RpcError:
                    continue
                self.accepted.append(Accepted(began, time.monotonic(), self.address, name, answer))

    def since(self, moment: float) -> list[Accepted]:
        """Registrations that began after a moment."""
        return [one for one in tuple(self.accepted) if one.asked_at > moment]

    def stop(self) -> None:
        self._over.set()
        self._thread.join(2 * VISIT_S)


def check_one_history(visitors: list[Visitors], leader: str) -> None:
    """No accepted registration is lost, and revisions follow the order in time: never two leaders at once."""
    accepted = sorted(
        (one for v in visitors for one in v.accepted), key=lambda one: one.answer.revision
    )
    assert accepted
    revisions = [one.answer.revision for one in accepted]
    assert len(set(revisions)) == len(revisions)
    latest = 0.0
    for one in accepted:
        # A registration answered before another one began has the lower revision.
        assert one.answered_at > latest
        latest = max(latest, one.asked_at)
    known = members_at(leader)
    assert {one.name for one in accepted if one.name not in known} == set()
