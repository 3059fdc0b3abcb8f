"""Row 25 of the fault contract on the control path: a replayed request has no second effect."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import grpc
import pytest

from balancer.persistence.idempotency import IdempotencyCache
from balancer.service import BalancerService
from control_plane import Plane, registration
from eaas.net.grpc_client import channel
from eaas.net.grpc_server import Service, serve
from eaas.rpc.v1 import (
    balancer_pb2,
    balancer_pb2_grpc,
    common_pb2,
    expert_pb2,
    expert_pb2_grpc,
    monitor_pb2,
    monitor_pb2_grpc,
)
from eaas.types import MemberState, ModelShape
from expert_server.experts.placements import PlacementHandler
from tls_world import code_of

pytestmark = pytest.mark.integration

REFUSED = grpc.StatusCode.FAILED_PRECONDITION
OK = grpc.StatusCode.OK
SHAPE = ModelShape("tiny", 4, 64, 2, ("l0",), "float32", "digest")


@pytest.fixture
def open_to(cleanup: ExitStack) -> Callable[[Service], grpc.Channel]:
    def start(service: Service) -> grpc.Channel:
        server = serve([service], "127.0.0.1", 0)
        cleanup.callback(server.stop, 0)
        return cleanup.enter_context(channel(server.address))

    return start


class Store:
    """Records loads and unloads."""

    count = 0

    def __init__(self) -> None:
        self.loads: list[Any] = []
        self.unloads: list[Any] = []

    def digest(self, _layer: int, _expert: int) -> int:
        return 0

    def load(self, wanted: Any, _is_given_up: Any, _digests: Any) -> int:
        self.loads.append(wanted)
        return 0

    def held(self) -> dict[int, list[int]]:
        return {0: [1, 2]}

    def unload(self, what: Any) -> None:
        self.unloads.append(what)

    def unload_spares(self) -> None:
        """There are none."""


def test_row_25_an_older_placement_that_is_sent_again(
    open_to: Callable[[Service], grpc.Channel],
) -> None:
    """Row 25: a request replayed or doubled: control path: refused."""
    store = Store()
    handler = PlacementHandler(store, SHAPE, lambda _epoch: None, lambda _epoch: None)  # type: ignore[arg-type]

    class Servicer(expert_pb2_grpc.ExpertServiceServicer):  # type: ignore[misc]
        PreparePlacement = staticmethod(handler.PreparePlacement)
        RetirePlacement = staticmethod(handler.RetirePlacement)

    add = expert_pb2_grpc.add_ExpertServiceServicer_to_server
    stub = expert_pb2_grpc.ExpertServiceStub(
        open_to(Service("eaas.rpc.v1.ExpertService", add, Servicer()))
    )

    def outcome(name: str, epoch: int, *experts: int) -> grpc.StatusCode:
        layers = [common_pb2.Holding(experts=experts)]
        request = getattr(expert_pb2, f"{name}Request")(epoch=epoch, layers=layers)
        return code_of(lambda: getattr(stub, name)(request))

    assert outcome("PreparePlacement", 4, 1) is OK
    assert outcome("PreparePlacement", 5, 2) is OK
    assert outcome("RetirePlacement", 5, 2) is OK
    loads, unloads = list(store.loads), list(store.unloads)
    assert outcome("PreparePlacement", 4, 1) is REFUSED
    assert outcome("RetirePlacement", 4, 1) is REFUSED
    assert outcome("RetirePlacement", 0) is REFUSED
    assert (store.loads, store.unloads, handler.epoch) == (loads, unloads, 5)


def test_row_25_an_operators_word_counts_once(open_to: Callable[[Service], grpc.Channel]) -> None:
    """Row 25: a request replayed or doubled: control path: refused. With its id it is answered as before,
    and has no second effect; another request with that id is refused.
    """
    done: list[str] = []

    class Rebalancer:
        """Settings and commands of the fake rebalancer."""

        class settings:
            policy = "spread"
            node_budget = None

        def change(self, **_changes: Any) -> None:
            done.append("changed")

        def level(self) -> None:
            done.append("level")

    balancer = BalancerService(lambda question: None, Rebalancer(), IdempotencyCache(), 1.0, 8)  # type: ignore[arg-type]
    add = balancer_pb2_grpc.add_BalancerServiceServicer_to_server
    stub = balancer_pb2_grpc.BalancerServiceStub(
        open_to(Service("eaas.rpc.v1.BalancerService", add, balancer))
    )
    request = balancer_pb2.SetPolicyRequest(request_id="r", policy="eplb")
    first = stub.SetPolicy(request)
    assert done == ["changed"]
    assert stub.SetPolicy(request) == first
    assert done == ["changed"]
    other = balancer_pb2.SetPolicyRequest(request_id="r", policy="craft")
    assert code_of(lambda: stub.SetPolicy(other)) is grpc.StatusCode.ALREADY_EXISTS
    assert done == ["changed"]


def test_row_25_an_older_record_and_a_former_life(plane: Plane) -> None:
    """Row 25: a request replayed or doubled: control path: refused."""
    line = plane.stack.enter_context(channel(plane.monitor(lease_s=60.0).address))
    stub = monitor_pb2_grpc.MonitorServiceStub(line)

    def register() -> int:
        return int(stub.Register(registration("balancer")).incarnation)

    def keep(incarnation: int, version: int) -> grpc.StatusCode:
        return code_of(
            lambda: stub.KeepRecord(
                monitor_pb2.KeepRecordRequest(
                    id="balancer", incarnation=incarnation, version=version, data=b"%d" % version
                )
            )
        )

    former = register()
    assert [keep(former, 1), keep(former, 2)] == [OK, OK]
    assert keep(former, 1) is REFUSED
    assert stub.GetRecord(monitor_pb2.GetRecordRequest(id="balancer")).data == b"2"
    # After a new registration, requests of the former incarnation are refused.
    assert register() == former + 1
    assert keep(former, 3) is grpc.StatusCode.NOT_FOUND
    goodbye = monitor_pb2.DeregisterRequest(id="balancer", incarnation=former)
    assert code_of(lambda: stub.Deregister(goodbye)) is OK
    snapshot = next(stub.Watch(monitor_pb2.WatchRequest(), timeout=10)).snapshot
    assert {m.id: m.state for m in snapshot.members}["balancer"] == MemberState.SERVING.number
