"""Frames of the grpc transport between client and server: Exchange messages without protobuf's copies.

A generated class would copy a slot's bytes twice on each side. The encoding is the same, so that either side
may use the generated classes instead:

    tag | slot as varint | tag | length as varint | bytes of the slot
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from eaas.wire.protobuf import bytes_tag, fields, number_tag, varint

if TYPE_CHECKING:
    from mmap import mmap

__all__ = ["EXCHANGE", "REQUEST_FRAMES", "RESPONSE_FRAMES", "Frame", "FrameCodec", "paste"]

EXCHANGE = "/eaas.rpc.v1.ExpertService/Exchange"
"""Full name of the gRPC method."""

_UINT32 = 0xFFFFFFFF


class Frame(NamedTuple):
    """A decoded frame: one slot's bytes.

    Attributes:
        slot: Index within the connection.
        data: View of the slot's bytes in the message; may be empty.
        connection_id: Only in a client's first frame; else empty.
    """

    slot: int
    data: memoryview
    connection_id: str


class FrameCodec:
    """Encodes and decodes the frames of one direction (requests or responses).

    Args:
        slot_field: Field number of the slot.
        data_field: Field number of the bytes.
        connection_field: Field number of the connection's id; 0 if the message has none.
    """

    def __init__(self, slot_field: int, data_field: int, connection_field: int = 0) -> None:
        self._slot_field = slot_field
        self._data_field = data_field
        self._connection_field = connection_field
        self._slot_tag = number_tag(slot_field)
        self._data_tag = bytes_tag(data_field)

    def encode(self, slot: int, buffer: mmap | bytearray, start: int, end: int) -> bytes:
        """On the sending side, encode the slot's bytes `buffer[start:end]` as a frame, with only one copy."""
        head = self._data_tag + varint(end - start)
        if slot:  # proto3 omits zeros.
            head = self._slot_tag + varint(slot) + head
        with memoryview(buffer) as whole, whole[start:end] as data:
            return b"".join((head, data))

    def decode(self, message: bytes) -> Frame:
        """On the receiving side, decode a frame; its data is a view of the message. Ignores unknown fields.

        Raises:
            ValueError: The bytes are not a protobuf message.
        """
        slot, data, connection_id = 0, memoryview(b""), ""
        for field, value in fields(message):
            if isinstance(value, int):
                if field == self._slot_field:
                    slot = value & _UINT32
            elif field == self._data_field:
                data = value
            elif field == self._connection_field:
                connection_id = str(value, "utf-8")
        return Frame(slot, data, connection_id)


REQUEST_FRAMES = FrameCodec(slot_field=2, data_field=3, connection_field=1)
"""Codec of ExchangeRequest, from client to server."""

RESPONSE_FRAMES = FrameCodec(slot_field=1, data_field=2)
"""Codec of ExchangeResponse, from server to client."""


def paste(buffer: mmap | bytearray | memoryview, offset: int, data: memoryview) -> None:
    """Copy received bytes (a frame, or a part of a checkpoint) into a buffer without holding the GIL."""
    # A slice assignment would hold the GIL.
    target = np.frombuffer(buffer, np.uint8, len(data), offset)
    np.copyto(target, np.frombuffer(data, np.uint8))
