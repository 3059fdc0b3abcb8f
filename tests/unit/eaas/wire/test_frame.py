"""The codecs of frames and chunks against the generated classes."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from eaas.rpc.v1 import expert_pb2 as pb
from eaas.wire.chunk import decode_chunk, encode_chunk
from eaas.wire.frame import REQUEST_FRAMES, RESPONSE_FRAMES, FrameCodec, paste

SLOTS = st.integers(0, 2**32 - 1)
MESSAGES = [(REQUEST_FRAMES, pb.ExchangeRequest), (RESPONSE_FRAMES, pb.ExchangeResponse)]


@pytest.mark.parametrize(("codec", "message"), MESSAGES)
@given(slot=SLOTS, data=st.binary(min_size=1, max_size=300), before=st.integers(0, 70))
@example(slot=127, data=b"x" * 127, before=0)
@example(slot=128, data=b"x" * 128, before=64)
@example(slot=0, data=b"x" * 16_384, before=1)
def test_a_frame_equals_the_generated_message(
    codec: FrameCodec, message: type, slot: int, data: bytes, before: int
) -> None:
    buffer = bytearray(before) + data + b"behind"
    frame = codec.encode(slot, buffer, before, before + len(data))
    assert frame == message(slot=slot, data=data).SerializeToString()
    parsed = message.FromString(frame)
    assert (parsed.slot, parsed.data) == (slot, data)


@given(slot=SLOTS, data=st.binary(max_size=300), connection_id=st.text(max_size=40))
def test_a_generated_message_is_read(slot: int, data: bytes, connection_id: str) -> None:
    request = pb.ExchangeRequest(slot=slot, data=data, connection_id=connection_id)
    response = pb.ExchangeResponse(slot=slot, data=data)
    for codec, message, sent in (
        (REQUEST_FRAMES, request, connection_id),
        (RESPONSE_FRAMES, response, ""),
    ):
        frame = codec.decode(message.SerializeToString())
        assert (frame.slot, frame.data, frame.connection_id) == (slot, data, sent)


def test_data_is_a_view_of_the_message() -> None:
    message = pb.ExchangeResponse(slot=1, data=b"payload").SerializeToString()
    assert RESPONSE_FRAMES.decode(message).data.obj is message
    message = encode_chunk(1, b"payload")
    assert decode_chunk(message).data.obj is message
    with pytest.raises(ValueError, match="of 5 bytes"):
        decode_chunk(b"\x12\x05four")


def test_unknown_fields_are_ignored() -> None:
    # Field 15 as a number, 8 bytes, bytes and 4 bytes, around the slot's.
    later = b"\x78\x05" + b"\x79" + bytes(8) + b"\x10\x07" + b"\x7a\x02hi" + b"\x7d" + bytes(4)
    assert pb.ExchangeRequest.FromString(later).slot == 7
    assert REQUEST_FRAMES.decode(later).slot == 7


@given(st.binary(max_size=60))
@example(b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f")
@example(b"\x1a\x05four")
@example(b"\x10")
@example(b"\x13")
@example(b"\x80" * 11)
def test_any_bytes_are_handled_like_protobuf(message: bytes) -> None:
    for codec, generated in MESSAGES:
        try:
            frame = codec.decode(message)
            parsed = generated.FromString(message)
        except (ValueError, DecodeError):
            continue
        assert (frame.slot, frame.data) == (parsed.slot, parsed.data)


@given(st.binary(min_size=1, max_size=5000), st.integers(0, 100))
def test_paste_writes_only_its_range(data: bytes, offset: int) -> None:
    buffer = bytearray(b"\xee" * (offset + len(data) + 9))
    paste(buffer, offset, memoryview(data))
    assert buffer == b"\xee" * offset + data + b"\xee" * 9


@given(
    offset=st.integers(0, 2**64 - 1), data=st.binary(max_size=300), digest=st.binary(max_size=20)
)
@example(offset=0, data=b"x" * 16_384, digest=b"")
@example(offset=128, data=b"", digest=bytes(16))
def test_a_chunk_equals_the_generated_message(offset: int, data: bytes, digest: bytes) -> None:
    message = pb.ReadShardResponse(offset=offset, data=data, digest=digest)
    encoded = encode_chunk(offset, data, digest)
    assert encoded == message.SerializeToString()
    assert decode_chunk(encoded) == (offset, data, digest)
