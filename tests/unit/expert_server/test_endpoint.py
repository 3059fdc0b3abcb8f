"""The server's end of a real gRPC stream, without a loop."""

import threading
from collections.abc import Iterator

import grpc
import pytest

from eaas.rpc.v1 import expert_pb2 as pb
from eaas.wire import RequestHeader, SlotState
from endpoint_box import EndpointBox, header_of
from expert_server.transports.slot_ownership import Grant
from waiting import eventually


class Endpoint(EndpointBox):
    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def stream(self, grant: Grant, *frames: pb.ExchangeRequest):
        """Hello and frames; half-closed once `go` is set."""

        def requests() -> Iterator[pb.ExchangeRequest]:
            yield pb.ExchangeRequest(connection_id=grant.connection_id)
            yield from frames
            self.go.wait()

        return self.stub.Exchange(requests(), timeout=20)


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.go.set()
    endpoint.close()


def frame(grant: Grant, slot: int = 0, tokens: int = 1) -> pb.ExchangeRequest:
    header = header_of(grant.generation, tokens)
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


def test_a_frame_is_written_and_the_streams_end_frees_the_slots(endpoint) -> None:
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
