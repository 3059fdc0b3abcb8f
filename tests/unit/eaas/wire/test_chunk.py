"""The chunk codec against the generated class."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from eaas.rpc.v1 import expert_pb2 as pb
from eaas.wire.chunk import decode_chunk, encode_chunk

OFFSETS = st.integers(0, 2**64 - 1)


@given(offset=OFFSETS, data=st.binary(max_size=300), digest=st.binary(max_size=20))
@example(offset=0, data=b"x" * 16_384, digest=b"")
@example(offset=128, data=b"", digest=bytes(16))
def test_a_chunk_equals_the_generated_message(offset: int, data: bytes, digest: bytes) -> None:
    message = pb.ReadShardResponse(offset=offset, data=data, digest=digest)
    encoded = encode_chunk(offset, data, digest)
    assert encoded == message.SerializeToString()
    assert decode_chunk(encoded) == (offset, data, digest)


def test_data_is_a_view_of_the_message() -> None:
    message = encode_chunk(1, b"payload")
    assert decode_chunk(message).data.obj is message


def test_an_invalid_message_is_refused() -> None:
    with pytest.raises(ValueError, match="of 5 bytes"):
        decode_chunk(b"\x12\x05four")
