"""The balancer's API through gRPC reflection alone, without this project's stubs."""

from __future__ import annotations

from collections.abc import Iterator
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


@pytest.fixture
def stranger(plane: Plane) -> Iterator[Stranger]:
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


def test_the_api_from_end_to_end(stranger: Stranger) -> None:
    assert SERVICE in stranger.services
    assert "grpc.health.v1.Health" in stranger.services
    call = stranger.call

    seen = call("GetHotness")
    assert [s.server_id for s in seen.servers] == ["s1", "s2", "s3"]
    assert seen.layers[0].tokens[0] > 10 * seen.layers[0].tokens[1]
    plan = call("Plan", policy="fractional", more_servers=1)
    assert len(plan.placement.servers) == 4
    assert stranger.refusal("Apply", plan_id=plan.plan_id) is grpc.StatusCode.FAILED_PRECONDITION
    plan = call("Plan", policy="fractional")
    assert plan.par_then < plan.par_now
    verdicts = plan.DESCRIPTOR.fields_by_name["verdict"].enum_type.values_by_number
    assert verdicts[plan.verdict].name == "VERDICT_MOVES"
    watch = call("WatchPlacement", known_epoch=1)
    answers = [call("Apply", request_id="1", plan_id=plan.plan_id) for _ in range(2)]
    assert answers[0] == answers[1]
    assert next(m for m in watch if m.HasField("placement")).epoch == 2
    watch.cancel()
    eventually(lambda: call("History", limit=1).entries[0].retire_s > 0)

    assert call("SetPolicy", request_id="2", policy="fractional").policy == "spread"
    assert stranger.refusal("SetPolicy", policy="magic") is grpc.StatusCode.INVALID_ARGUMENT
    replica = {"layer": 2, "expert": 5}
    placement = call("GetPlacement").placement
    without = next(s.server_id for s in placement.servers if 5 not in s.layers[2].experts)
    call("PinExpert", request_id="3", server_id=without, **replica)
    eventually(lambda: call("History", limit=1).entries[0].retire_s > 0)
    servers = call("GetPlacement").placement.servers
    assert without in [s.server_id for s in servers if 5 in s.layers[2].experts]
    call("UnpinExpert", request_id="4", server_id=without, **replica)
    assert stranger.refusal("UnpinExpert", server_id=without, **replica) is (
        grpc.StatusCode.NOT_FOUND
    )
    call("RemoveReplica", request_id="5", server_id=without, **replica)
    eventually(lambda: call("History", limit=1).entries[0].retire_s > 0)
    added = call("AddReplica", request_id="6", **replica).server_id
    eventually(lambda: call("History", limit=1).entries[0].retire_s > 0)
    call("RemoveReplica", request_id="7", server_id=added, **replica)
    eventually(lambda: call("History", limit=1).entries[0].retire_s > 0)
    forced = call("Rebalance", request_id="8", force=True)
    assert forced.plan.policy == "fractional"
    assert stranger.refusal("SetPolicy", request_id="8", policy="eplb") is (
        grpc.StatusCode.ALREADY_EXISTS
    )
    call("DrainServer", server_id="s3")
    eventually(
        lambda: [s.server_id for s in call("GetPlacement").placement.servers] == ["s1", "s2"]
    )
    assert stranger.refusal("DrainServer", server_id="nobody") is grpc.StatusCode.NOT_FOUND
    triggers = {entry.trigger for entry in call("History").entries}
    assert {"manual", "operator", "membership"} <= triggers
    assert call("GetScale").fewest == 1
