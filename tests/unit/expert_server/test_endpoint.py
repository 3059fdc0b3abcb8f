"""The server's end of a real gRPC stream, without a loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from eaas.net.grpc_client import channel
from eaas.net.grpc_server import Service, serve
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.rpc.v1 import expert_pb2_grpc
from eaas.types import ModelShape
from eaas.wire import Arena, RequestHeader, SlotState
from eaas.wire.header import WireDtype
from expert_server.experts.placements import PlacementHandler
from expert_server.load_report.hotness import HotnessHandler
from expert_server.service import SERVICE, ExpertService, add_expert_service
from expert_server.transports.slot_ownership import Grant, SlotTable
from expert_server.weights.sharing import CheckpointSharer

SHAPE = ModelShape("tiny", 4, 8, 2, ("layer.0",), "float32", "digest")


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Endpoint:
    def __init__(self) -> None:
        self.arena = Arena.create_local(4, 512, 512, 1)
        self.table = SlotTable(self.arena)
        service = ExpertService(
            self.arena,
            self.table,
            SHAPE,
            PlacementHandler(None, SHAPE, print, print),
            CheckpointSharer(None, 1),
            HotnessHandler(SHAPE, None, None),
            lambda: None,
        )
        self.server = serve([Service(SERVICE, add_expert_service, service)], "127.0.0.1", 0)
        self.channel = channel(self.server.address)
        self.stub = expert_pb2_grpc.ExpertServiceStub(self.channel)
        self.go = threading.Event()

    def grant(self) -> Grant:
        grant = self.table.grant("client", 1, 2)
        assert grant is not None
        return grant

    def stream(self, grant: Grant, *frames: pb.ExchangeRequest):
        """Hello and frames; half-closed once `go` is set."""

        def requests() -> Iterator[pb.ExchangeRequest]:
            yield pb.ExchangeRequest(connection_id=grant.connection_id)
            yield from frames
            self.go.wait()

        return self.stub.Exchange(requests(), timeout=20)

    def state(self, slot: int) -> int:
        return self.arena.flags.load(slot)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.go.set()
    endpoint.channel.close()
    eventually(lambda: "exchange" not in [t.name for t in threading.enumerate()])
    endpoint.server.stop(0)


def frame(grant: Grant, slot: int = 0, tokens: int = 1) -> pb.ExchangeRequest:
    header = RequestHeader.of(
        dtype=WireDtype.FLOAT32,
        generation=grant.generation,
        request_id=1,
        epoch=1,
        budget_us=1,
        layer=0,
        batch_size=tokens,
        hidden_size=8,
        top_k=2,
    )
    data = bytearray(header.end)
    header.pack_into(data, 0)
    return pb.ExchangeRequest(slot=slot, data=bytes(data))


def code(stream) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as error:
        list(stream)
    return error.value.code()


def test_an_unknown_connection(endpoint: Endpoint) -> None:
    grant = endpoint.grant()
    endpoint.table.revoke(grant.connection_id)
    assert code(endpoint.stream(grant)) == grpc.StatusCode.FAILED_PRECONDITION


def test_a_frame_is_written_and_the_streams_end_frees_the_slots(
    endpoint: Endpoint,
) -> None:
    grant = endpoint.grant()
    stream = endpoint.stream(grant, frame(grant, 1))
    eventually(lambda: endpoint.state(1) == SlotState.WRITTEN)
    stream.cancel()
    eventually(lambda: endpoint.table.get(grant.connection_id) is None)
    assert endpoint.state(1) == SlotState.OFFLINE


def test_a_client_that_closes_its_side_ends_the_stream(endpoint: Endpoint) -> None:
    grant = endpoint.grant()
    stream = endpoint.stream(grant, frame(grant))
    eventually(lambda: endpoint.state(0) == SlotState.WRITTEN)
    endpoint.go.set()
    assert code(stream) == grpc.StatusCode.FAILED_PRECONDITION
    assert endpoint.table.get(grant.connection_id) is None


def test_a_revoked_connection_ends_its_stream(endpoint: Endpoint) -> None:
    grant = endpoint.grant()
    stream = endpoint.stream(grant, frame(grant))
    eventually(lambda: endpoint.state(0) == SlotState.WRITTEN)
    endpoint.table.revoke_all()
    assert code(stream) == grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("wrong", ["occupied", "beyond", "short", "long", "huge", "empty"])
def test_a_wrong_frame_is_refused_and_writes_nothing(endpoint: Endpoint, wrong: str) -> None:
    grant = endpoint.grant()
    good = frame(grant)
    bad = {
        "occupied": frame(grant, 0, tokens=2),
        "beyond": frame(grant, 2),
        "short": pb.ExchangeRequest(slot=1, data=good.data[:-1]),
        "long": pb.ExchangeRequest(slot=1, data=good.data + b"x"),
        "huge": frame(grant, 1, tokens=100),
        "empty": pb.ExchangeRequest(slot=1),
    }[wrong]
    stream = endpoint.stream(grant, good, bad)
    assert code(stream) == grpc.StatusCode.INVALID_ARGUMENT
    offset = endpoint.arena.request_offset(0)
    assert RequestHeader.unpack_from(endpoint.arena.buffer, offset).batch_size == 1
    rest = endpoint.arena.buffer[endpoint.arena.request_offset(1) :]
    assert not any(rest)
    assert endpoint.table.get(grant.connection_id) is None
