"""Fuzz targets: parsers of untrusted bytes, with the promises that must hold for any input.

A target fails if the code under test breaks a promise or raises an error that is not in its contract.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from answer_headers import validate_result
from eaas.errors import SlotCorruptError, WrongRequestError
from eaas.rpc.v1 import balancer_pb2, common_pb2, expert_pb2, monitor_pb2
from eaas.spares import SpareReplicas
from eaas.types import Member, Placement
from eaas.wire import _protocol
from eaas.wire.chunk import decode_chunk, encode_chunk
from eaas.wire.frame import REQUEST_FRAMES, RESPONSE_FRAMES
from eaas.wire.header import (
    CHECKSUM_FLAG,
    MAGIC,
    REQUEST_HEADER_BYTES,
    RESULT_HEADER_BYTES,
    VERSION,
    RequestHeader,
    ResultHeader,
    Status,
    WireDtype,
    payload_layout,
    result_length,
)
from eaas.wire.slot import (
    SlotLimits,
    request_views,
    result_view,
    seal,
    validate_request,
    verify,
)

__all__ = ["TARGETS", "seeds"]

HIDDEN, TOP_K, TOKENS, LAYERS, GENERATION = 8, 2, 6, 4, 7
LIMITS = SlotLimits(
    payload_layout(TOKENS, HIDDEN, TOP_K, WireDtype.FLOAT32).total,
    result_length(TOKENS, HIDDEN),
    HIDDEN,
    LAYERS,
)
_GUARD = 0xA5
_MAGIC = struct.pack("<IH", MAGIC, VERSION)


def slot(data: bytes) -> None:
    """A request in a slot. Bit 0 of the first byte seals it, bit 1 sets a valid magic and generation."""
    mode, data = (data or b"\0")[0], data[1:]
    room = REQUEST_HEADER_BYTES + LIMITS.payload_capacity
    buffer = bytearray(data[:room].ljust(room, b"\0"))
    # The next slot, which must not change.
    buffer += bytes([_GUARD]) * 64
    if mode & 2:
        buffer[:6] = _MAGIC
        buffer[8:12] = struct.pack("<I", GENERATION)
    header = RequestHeader.unpack_from(buffer, 0)
    if mode & 1 and header.payload_length <= LIMITS.payload_capacity:
        header = header._replace(flags=CHECKSUM_FLAG)
        seal(buffer, 0, header)
        header = RequestHeader.unpack_from(buffer, 0)
    try:
        fault = _protocol.request_fault(header.packed(), LIMITS, GENERATION)
        validate_request(buffer, 0, header, fault)
    except (SlotCorruptError, WrongRequestError):
        return
    assert header.end <= room
    assert result_length(header.batch_size, header.hidden_size) <= LIMITS.result_capacity
    sections = request_views(buffer, 0, header)
    assert [view.shape for view in sections] == [
        (header.batch_size, HIDDEN),
        (header.batch_size, header.top_k),
        (header.batch_size, header.top_k),
    ]
    for view in sections:
        view.view(np.uint8)[...] = 1
    assert set(buffer[room:]) == {_GUARD}


def answer(data: bytes) -> None:
    """An answer in a slot, to a client that asked for `rows` tokens."""
    mode, data = (data or b"\0")[0], data[1:]
    rows = 1 + mode % TOKENS
    room = RESULT_HEADER_BYTES + LIMITS.result_capacity
    buffer = bytearray(data[:room].ljust(room, b"\0"))
    if mode & 64:
        buffer[:6] = _MAGIC
        buffer[8:12] = struct.pack("<I", GENERATION)
    header = ResultHeader.unpack_from(buffer, 0)
    try:
        validate_result(
            header,
            result_capacity=LIMITS.result_capacity,
            request_id=header.request_id if mode & 64 else 5,
            rows=rows,
            hidden_size=HIDDEN,
            generation=GENERATION,
        )
        if mode & 128:
            verify(buffer, 0, header)
    except SlotCorruptError:
        return
    assert header.end <= room
    if header.status == Status.OK:
        assert result_view(buffer, 0, header.rows, header.hidden_size).shape == (rows, HIDDEN)
    else:
        assert (header.rows, header.length) == (0, 0)


def frame(data: bytes) -> None:
    """A frame of the grpc transport: the hand-written decoder agrees with protobuf."""
    for codec, cls in (
        (REQUEST_FRAMES, expert_pb2.ExchangeRequest),
        (RESPONSE_FRAMES, expert_pb2.ExchangeResponse),
    ):
        try:
            read = codec.decode(data)
        except ValueError:
            continue
        try:
            message = cls.FromString(data)
        except DecodeError:
            continue  # Protobuf is stricter about unknown fields.
        assert (read.slot, bytes(read.data)) == (message.slot, message.data)
        assert read.connection_id == getattr(message, "connection_id", "")


def chunk(data: bytes) -> None:
    """A chunk of a shard: the hand-written decoder agrees with protobuf."""
    try:
        read = decode_chunk(data)
    except ValueError:
        return
    try:
        message = expert_pb2.ReadShardResponse.FromString(data)
    except DecodeError:
        return
    assert (read.offset, read.data, read.digest) == (message.offset, message.data, message.digest)
    again = decode_chunk(encode_chunk(read.offset, bytes(read.data), read.digest))
    assert again == read


def _placement(message: Any) -> None:
    placement = Placement.from_proto(message)
    assert placement.holds_LSE.nbytes + placement.shares_LSE.nbytes <= 5 << 28
    assert Placement.from_proto(placement.to_proto()).servers == placement.servers


def _member(message: Any) -> None:
    assert Member.from_proto(Member.from_proto(message).to_proto()) == Member.from_proto(message)


def _spares(message: Any) -> None:
    spares = SpareReplicas.from_proto(message)
    layers = 1 + max((layer for places in spares.held.values() for layer, _ in places), default=0)
    assert SpareReplicas.from_proto(spares.to_proto(layers)) == spares


_ADMITTED: tuple[tuple[Any, Callable[[Any], object]], ...] = (
    (common_pb2.Member, _member),
    (common_pb2.Placement, _placement),
    (monitor_pb2.RegisterRequest, lambda m: _member(m.member)),
    (balancer_pb2.ApplyRequest, lambda m: _placement(m.placement)),
    (monitor_pb2.WatchResponse, lambda m: [_member(x) for x in m.snapshot.members]),
    (
        balancer_pb2.WatchPlacementResponse,
        lambda m: (_placement(m.placement), _spares(m.spares)),
    ),
)


def admission(data: bytes) -> None:
    """A message of the contract (the first byte selects it) becomes a value or is a ValueError."""
    cls, admit = _ADMITTED[(data or b"\0")[0] % len(_ADMITTED)]
    try:
        message = cls.FromString(data[1:])
    except DecodeError:
        return
    try:
        admit(message)
    except ValueError:
        return


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (slot, answer, frame, chunk, admission)
}


def seeds() -> Iterator[tuple[str, str, bytes]]:
    """Target, name and bytes of valid inputs, the start of the corpus."""
    for dtype in WireDtype:
        header = RequestHeader.of(
            dtype=dtype, generation=GENERATION, request_id=3, epoch=1, budget_us=10**6, layer=1,
            batch_size=2, hidden_size=HIDDEN, top_k=TOP_K, flags=0,
        )  # fmt: skip
        buffer = bytearray(header.end)
        header.pack_into(buffer, 0)
        yield "slot", f"request-{dtype.name.lower()}", b"\0" + bytes(buffer)
        yield "slot", f"sealed-{dtype.name.lower()}", b"\1" + bytes(buffer)
    done = ResultHeader.of(
        Status.OK, generation=GENERATION, request_id=5, rows=3, hidden_size=HIDDEN
    )
    buffer = bytearray(done.end)
    done.pack_into(buffer, 0)
    yield "answer", "ok", b"\2" + bytes(buffer)
    refused = ResultHeader.of(Status.EXPIRED, generation=GENERATION, request_id=5)
    buffer = bytearray(refused.end)
    refused.pack_into(buffer, 0)
    yield "answer", "expired", b"\0" + bytes(buffer)
    exchange = expert_pb2.ExchangeRequest(connection_id="c-1", slot=3, data=b"abc")
    yield "frame", "request", exchange.SerializeToString()
    shard = expert_pb2.ReadShardResponse(offset=1 << 40, data=b"abc", digest=b"0123456789abcdef")
    yield "chunk", "last", shard.SerializeToString()
    model = common_pb2.ModelShape(
        model_type="tiny", num_experts=4, hidden_size=8, top_k=2, layer_names=["a"], dtype="float32"
    )
    member = common_pb2.Member(id="a", role=1, pid=1, state=2, address="h:1", model=model)
    placement = common_pb2.Placement(
        epoch=1,
        num_layers=1,
        num_experts=2,
        servers=[
            common_pb2.ServerPlacement(
                server_id="s", layers=[common_pb2.Holding(experts=[0, 1], shares=[1, 1])]
            )
        ],
    )
    examples = (
        member,
        placement,
        monitor_pb2.RegisterRequest(member=member, protocol_version=1),
        balancer_pb2.ApplyRequest(placement=placement),
        monitor_pb2.WatchResponse(snapshot=monitor_pb2.Snapshot(revision=1, members=[member])),
        balancer_pb2.WatchPlacementResponse(
            epoch=1,
            placement=placement,
            spares=common_pb2.SpareReplicas(epoch=1, servers=placement.servers),
        ),
    )
    for number, message in enumerate(examples):
        yield "admission", type(message).__name__, bytes([number]) + message.SerializeToString()
