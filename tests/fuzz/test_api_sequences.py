"""Sequences of calls with arbitrary fields, at a real monitor and a real balancer.

Every call ends in time with an answer or a status of the contract (never UNKNOWN or INTERNAL), and no call
breaks an invariant.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Set
from contextlib import ExitStack
from inspect import signature
from typing import Any

import grpc
import hypothesis
import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from balancer.policies.registry import find
from control_plane import SHAPE, Plane, eventually, registration
from eaas.membership.session import PROTOCOL_VERSION
from eaas.net.grpc_client import channel
from eaas.rpc.v1 import balancer_pb2, balancer_pb2_grpc, monitor_pb2, monitor_pb2_grpc
from eaas.types import Member, MemberState, Placement, Role

pytestmark = pytest.mark.integration

_T = FieldDescriptor
_NUMBERS: dict[int, tuple[int, int]] = {
    _T.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    _T.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    _T.CPPTYPE_UINT32: (0, 2**32 - 1),
    _T.CPPTYPE_UINT64: (0, 2**64 - 1),
}
Known = Mapping[str, st.SearchStrategy[Any]]


def messages(descriptor: Descriptor, known: Known, depth: int = 3) -> st.SearchStrategy[Any]:
    """Messages of a type.

    Args:
        descriptor: The type.
        known: Meaningful values by field name; a field has mostly these, sometimes any value.
        depth: Maximum depth of nested messages.
    """
    cls = GetMessageClass(descriptor)

    @st.composite
    def make(draw: st.DrawFn) -> Any:
        message = cls()
        for field in descriptor.fields:
            if draw(st.integers(0, 2)):
                _fill(draw, message, field, known, depth)
        return message

    return make()


def _fill(draw: st.DrawFn, message: Any, field: Any, known: Known, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        target = getattr(message, field.name)
        for _ in range(draw(st.integers(0, 2))):
            name = draw(known.get(f"{field.name}.key", _scalar(key)))
            target[name] = draw(_scalar(value))
    elif field.message_type is not None:
        if not depth:
            return
        inner = messages(field.message_type, known, depth - 1)
        if field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(inner, max_size=3)))
        else:
            getattr(message, field.name).CopyFrom(draw(inner))
    else:
        values = _scalar(field)
        if field.name in known:
            values = st.integers(0, 5).flatmap(
                lambda n, it=known[field.name], any_=values: it if n else any_
            )
        if field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(values, max_size=4)))
        else:
            setattr(message, field.name, draw(values))


def _scalar(field: Any) -> st.SearchStrategy[Any]:
    kind = field.cpp_type
    if kind in _NUMBERS:
        least, most = _NUMBERS[kind]
        return st.integers(0, 8) | st.integers(least, most) | st.sampled_from((least, most))
    if kind == _T.CPPTYPE_BOOL:
        return st.booleans()
    if kind in (_T.CPPTYPE_FLOAT, _T.CPPTYPE_DOUBLE):
        return st.floats(width=32) | st.sampled_from((0.0, 1.0, 0.5))
    if kind == _T.CPPTYPE_ENUM:
        return st.integers(0, len(field.enum_type.values)) | st.just(2**31 - 1)
    if field.type == _T.TYPE_BYTES:
        return st.binary(max_size=64)
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


Code = grpc.StatusCode
CALL_S = 20.0
NAMES = ("s1", "s2", "s3")


def outcome(call: Callable[[], Any]) -> tuple[grpc.StatusCode, Any, str]:
    try:
        return Code.OK, call(), ""
    except grpc.RpcError as error:
        return error.code(), None, str(error.details())


# -- the monitor --------------------------------------------------------------------------------------

IDS = st.sampled_from(("a", "b", "monitor", ""))
# For a field out of its range.
_ANY = {Code.INVALID_ARGUMENT}
MONITOR_SAYS: dict[str, Set[grpc.StatusCode]] = {
    "Register": {
        *(Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.ALREADY_EXISTS),
    },
    "Heartbeat": {Code.INVALID_ARGUMENT, Code.NOT_FOUND},
    "Watch": _ANY,
    "Deregister": _ANY,
    "ReportOutcome": {Code.INVALID_ARGUMENT, Code.NOT_FOUND},
    "KeepRecord": {Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.FAILED_PRECONDITION},
    "GetRecord": _ANY,
}


def monitor_machine(address: str, cleanup: ExitStack) -> type[RuleBasedStateMachine]:
    line = cleanup.enter_context(channel(address))
    stub = monitor_pb2_grpc.MonitorServiceStub(line)
    methods = {m.name: m for m in monitor_pb2.DESCRIPTOR.services_by_name["MonitorService"].methods}
    assert methods.keys() == MONITOR_SAYS.keys()
    known = {
        "id": IDS,
        "client_id": IDS,
        "server_id": IDS,
        "role": st.integers(1, len(Role)),
        "state": st.integers(1, 3),
        "protocol_version": st.just(PROTOCOL_VERSION),
        "incarnation": st.integers(0, 3),
    }

    class Machine(RuleBasedStateMachine):
        lives: dict[str, int]

        def __init__(self) -> None:
            super().__init__()
            self.revision = -1
            self.before = self.snapshot()

        @staticmethod
        def snapshot() -> Any:
            call = stub.Watch(monitor_pb2.WatchRequest(knows_frontends=True), timeout=CALL_S)
            try:
                return next(call).snapshot
            finally:
                call.cancel()

        @rule(data=st.data(), name=st.sampled_from(sorted(MONITOR_SAYS)))
        def call(self, data: st.DataObject, name: str) -> None:
            request = data.draw(messages(methods[name].input_type, known), label=name)
            method = getattr(stub, name)
            if name == "Heartbeat":
                code, _, why = outcome(lambda: next(method(iter([request]), timeout=CALL_S)))
            elif name == "Watch":
                calling = method(request, timeout=CALL_S)
                code, _, why = outcome(lambda: next(calling))
                calling.cancel()
            else:
                code, _, why = outcome(lambda: method(request, timeout=CALL_S))
            assert code is Code.OK or code in MONITOR_SAYS[name], (code, why)

        @rule(member_id=st.sampled_from(("a", "b")), role=st.sampled_from(list(Role)))
        def register_rightly(self, member_id: str, role: Role) -> None:
            request = registration(member_id, role)
            code, answer, why = outcome(lambda: stub.Register(request, timeout=CALL_S))
            assert code in (Code.OK, Code.ALREADY_EXISTS), why
            if code is Code.OK:
                found = {m.id: m for m in self.snapshot().members}
                assert found[member_id].incarnation == answer.incarnation

        @invariant()
        def views_are_consistent(self) -> None:
            now = self.snapshot()
            assert now.revision >= self.before.revision
            assert now.life == self.before.life
            ids = [m.id for m in now.members]
            assert len(ids) == len(set(ids))
            members = {m.id: Member.from_proto(m) for m in now.members}
            assert members["monitor"].state is MemberState.SERVING
            for former in self.before.members:
                if former.id in members:
                    assert members[former.id].incarnation >= former.incarnation
            self.before = now

    return Machine


def test_any_calls_at_a_monitor(
    cleanup: ExitStack, budget: Callable[..., hypothesis.settings]
) -> None:
    monitor = Plane(cleanup).monitor(lease_s=60.0)
    run_state_machine_as_test(monitor_machine(monitor.address, cleanup), settings=budget(12, 30))


# -- the balancer -------------------------------------------------------------------------------------

_WISHES = {Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.NOT_FOUND, Code.ALREADY_EXISTS}
BALANCER_SAYS: dict[str, Set[grpc.StatusCode]] = {
    **dict.fromkeys(("GetPlacement", "GetHotness", "History", "GetScale"), _ANY),
    **dict.fromkeys(("WatchPlacement", "WatchScale", "RefuseScale"), _ANY),
    "Plan": {Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION},
    **dict.fromkeys(("Apply", "Rebalance", "SetPolicy", "PinExpert", "UnpinExpert"), _WISHES),
    **dict.fromkeys(("AddReplica", "RemoveReplica"), _WISHES),
    "DrainServer": {Code.INVALID_ARGUMENT, Code.NOT_FOUND},
    "Scale": {Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION},
}
POLICIES = ("spread", "eplb", "eplb-hierarchical", "scalpel", "craft", "fractional")


def balancer_machine(address: str, cleanup: ExitStack) -> type[RuleBasedStateMachine]:
    line = cleanup.enter_context(channel(address))
    stub = balancer_pb2_grpc.BalancerServiceStub(line)
    service = balancer_pb2.DESCRIPTOR.services_by_name["BalancerService"]
    methods = {m.name: m for m in service.methods}
    assert methods.keys() == BALANCER_SAYS.keys()
    parameters = [p for name in POLICIES for p in signature(find(name)).parameters.values()]
    knobs = sorted({p.name for p in parameters if p.kind is p.KEYWORD_ONLY})
    known = {
        "request_id": st.sampled_from(("", "r1", "r2")),
        "server_id": st.sampled_from(NAMES),
        "speeds.key": st.sampled_from(NAMES),
        "knobs.key": st.sampled_from(knobs),
        "without_servers": st.sampled_from(NAMES),
        "policy": st.sampled_from(POLICIES),
        "layer": st.integers(0, SHAPE.num_layers - 1),
        "expert": st.integers(0, SHAPE.num_experts - 1),
        "num_layers": st.just(SHAPE.num_layers),
        "num_experts": st.just(SHAPE.num_experts),
        "more_servers": st.integers(0, 2),
        "redundancy": st.integers(1, 3),
        "num_redundant_experts": st.integers(0, 4),
        "servers": st.integers(1, 4),
    }

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.epoch = 0

        @rule(data=st.data(), name=st.sampled_from(sorted(BALANCER_SAYS)))
        def call(self, data: st.DataObject, name: str) -> None:
            request = data.draw(messages(methods[name].input_type, known), label=name)
            if name == "DrainServer" and request.server_id in NAMES:
                return  # It would drain all servers.
            method = getattr(stub, name)
            begun = time.monotonic()
            if methods[name].server_streaming:
                calling = method(request, timeout=CALL_S)
                # A stream without news would answer only after two seconds.
                if name == "WatchPlacement" and request.known_epoch >= self.epoch:
                    calling.cancel()
                    return
                code, _, why = outcome(lambda: next(calling))
                calling.cancel()
            else:
                code, _, why = outcome(lambda: method(request, timeout=CALL_S))
            assert code is Code.OK or code in BALANCER_SAYS[name], (code, why)
            assert time.monotonic() - begun < CALL_S / 2, "one call delays the others"

        @invariant()
        def every_expert_is_placed(self) -> None:
            answer = stub.GetPlacement(balancer_pb2.GetPlacementRequest(), timeout=CALL_S)
            placement = Placement.from_proto(answer.placement)
            assert placement.epoch >= self.epoch
            self.epoch = placement.epoch
            assert placement.holds_LSE.any(axis=1).all()
            assert set(placement.servers) <= set(NAMES)
            assert np.allclose(placement.shares_LSE.sum(axis=1), 1, atol=1e-2)

    return Machine


def test_any_calls_at_a_balancer(
    cleanup: ExitStack, budget: Callable[..., hypothesis.settings]
) -> None:
    plane = Plane(cleanup)
    monitor = plane.monitor()
    settings = {"expected_servers": 3, "redundancy": 1, "num_redundant_experts": 3}
    balancer = plane.balancer(monitor.address, step_s=0.1, step_interval=10**6, **settings)
    servers = [plane.server(monitor.address, name) for name in NAMES]
    with channel(balancer.address) as line:
        stub = balancer_pb2_grpc.BalancerServiceStub(line)
        eventually(lambda: stub.GetPlacement(balancer_pb2.GetPlacementRequest()).placement.epoch)
        eventually(lambda: all(server.retired for server in servers))

        def has_seen_load() -> bool:
            for server in servers:
                server.tokens_LE += 100
                server.tokens_LE[:, 0] += 5000
            return bool(stub.GetHotness(balancer_pb2.GetHotnessRequest()).steps)

        eventually(has_seen_load)
    machine = balancer_machine(balancer.address, cleanup)
    run_state_machine_as_test(machine, settings=budget(8, 20))
    assert balancer.failure is None
