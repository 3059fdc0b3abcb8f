"""ReportOutcome over real gRPC: which reports are errors and which are ignored."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest

from control_plane import Plane, registration
from eaas.net.grpc_client import channel
from eaas.rpc.v1 import monitor_pb2, monitor_pb2_grpc
from eaas.types import Role

pytestmark = pytest.mark.integration


@pytest.fixture
def stub(plane: Plane) -> monitor_pb2_grpc.MonitorServiceStub:
    # Nobody here sends heartbeats.
    line = plane.stack.enter_context(channel(plane.monitor(lease_s=60.0).address))
    stub = monitor_pb2_grpc.MonitorServiceStub(line)
    for name, role in (("server", Role.EXPERT_SERVER), ("client", Role.ATTENTION_CLIENT)):
        stub.Register(registration(name, role))
    return stub


@pytest.fixture
def report(stub: monitor_pb2_grpc.MonitorServiceStub) -> Callable[..., None]:
    def send(
        client: str = "client", incarnation: int = 1, about: str = "server", of: int = 1
    ) -> None:
        outcomes = monitor_pb2.ServerOutcomes(
            server_id=about, server_incarnation=of, timed_out=3, failures_since_answer=3
        )
        stub.ReportOutcome(
            monitor_pb2.ReportOutcomeRequest(
                client_id=client, client_incarnation=incarnation, servers=[outcomes]
            )
        )

    return send


@pytest.mark.parametrize(
    ("client", "incarnation", "code"),
    [
        ("nobody", 1, grpc.StatusCode.NOT_FOUND),
        ("client", 2, grpc.StatusCode.NOT_FOUND),
        ("", 0, grpc.StatusCode.INVALID_ARGUMENT),
        ("server", 1, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
def test_reports_that_are_refused(
    report: Callable[..., None], client: str, incarnation: int, code: grpc.StatusCode
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        report(client, incarnation)
    assert caught.value.code() is code


def test_a_goodbye_ends_the_right_to_report(
    stub: monitor_pb2_grpc.MonitorServiceStub, report: Callable[..., None]
) -> None:
    report()
    stub.Deregister(monitor_pb2.DeregisterRequest(id="client", incarnation=1))
    with pytest.raises(grpc.RpcError) as caught:
        report()
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("about", "of"), [("nobody", 1), ("server", 2), ("server", 0), ("client", 1), ("monitor", 1)]
)
def test_unknown_servers_and_incarnations_are_ignored(
    report: Callable[..., None], about: str, of: int
) -> None:
    for _ in range(2):
        report(about=about, of=of)
