"""The balancer's API through gRPC reflection alone, without this project's stubs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from control_plane import Plane, eventually

pytestmark = pytest.mark.integration
SERVICE = "eaas.rpc.v1.BalancerService"


class Stranger:
    """A client that calls methods by name, with fields by name."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        database = ProtoReflectionDescriptorDatabase(self._channel)
        self.services = list(database.get_services())
        self._pool = descriptor_pool.DescriptorPool(database)
        self.methods: dict[str, MethodDescriptor] = {
            m.name: m for m in self._pool.FindServiceByName(SERVICE).methods
        }

    def call(self, name: str, **fields: Any) -> Any:
        method = self.methods[name]
        request_type = message_factory.GetMessageClass(method.input_type)
        kind = "unary_stream" if method.server_streaming else "unary_unary"
        call = getattr(self._channel, kind)(
            f"/{SERVICE}/{name}",
            request_serializer=request_type.SerializeToString,
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        return call(request_type(**fields), timeout=20)

    def refusal(self, name: str, **fields: Any) -> grpc.StatusCode:
        with pytest.raises(grpc.RpcError) as caught:
            self.call(name, **fields)
        code: grpc.StatusCode = caught.value.code()
        return code

    def close(self) -> None:
        self._channel.close()


@pytest.fixture(scope="module")
def stranger() -> Iterator[Stranger]:
    with ExitStack() as stack:
        yield from _strangers(Plane(stack))


def _strangers(plane: Plane) -> Iterator[Stranger]:
    address = plane.monitor().address
    balancer = plane.balancer(
        address, expected_servers=3, redundancy=1, num_redundant_experts=3, step_s=0.1
    )
    servers = [plane.server(address, name) for name in ("s1", "s2", "s3")]
    stranger = Stranger(balancer.address)
    eventually(lambda: stranger.call("GetPlacement").placement.epoch == 1)
    eventually(lambda: all(server.retired for server in servers))

    def has_seen_load() -> object:
        for server in servers:
            server.tokens_LE += 100
            server.tokens_LE[:, 0] += 5000
        return stranger.call("GetHotness").steps

    eventually(has_seen_load)
    yield stranger
    stranger.close()


def test_a_stranger_plans_and_applies(stranger: Stranger) -> None:
    assert SERVICE in stranger.services
    assert "grpc.health.v1.Health" in stranger.services
    call = stranger.call
    seen = call("GetHotness")
    assert [s.server_id for s in seen.servers] == ["s1", "s2", "s3"]
    plan = call("Plan", policy="fractional")
    assert plan.par_then < plan.par_now
    verdicts = plan.DESCRIPTOR.fields_by_name["verdict"].enum_type.values_by_number
    assert verdicts[plan.verdict].name == "VERDICT_MOVES"
    watch = call("WatchPlacement", known_epoch=1)
    answers = [call("Apply", request_id="1", plan_id=plan.plan_id) for _ in range(2)]
    assert answers[0] == answers[1]
    assert next(m for m in watch if m.HasField("placement")).epoch == 2
    watch.cancel()


@pytest.mark.parametrize(
    ("name", "fields", "code"),
    [
        ("Apply", {"plan_id": "none"}, grpc.StatusCode.NOT_FOUND),
        ("SetPolicy", {"policy": "magic"}, grpc.StatusCode.INVALID_ARGUMENT),
        ("Rebalance", {"policy": "magic"}, grpc.StatusCode.INVALID_ARGUMENT),
        ("PinExpert", {"server_id": "nobody"}, grpc.StatusCode.NOT_FOUND),
        ("UnpinExpert", {"server_id": "s1"}, grpc.StatusCode.NOT_FOUND),
        ("AddReplica", {"layer": 9}, grpc.StatusCode.INVALID_ARGUMENT),
        ("RemoveReplica", {"server_id": "nobody"}, grpc.StatusCode.NOT_FOUND),
        ("DrainServer", {"server_id": "nobody"}, grpc.StatusCode.NOT_FOUND),
        ("Scale", {"servers": 3}, grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
def test_a_refusal_has_the_promised_code(
    stranger: Stranger, name: str, fields: dict[str, Any], code: grpc.StatusCode
) -> None:
    assert stranger.refusal(name, **fields) is code
