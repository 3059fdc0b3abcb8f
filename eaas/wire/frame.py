"""Frames of the grpc transport: protobuf's bytes of an Exchange message, made and read without its copies.

A generated class copies a slot's bytes twice on each side (into the message and out of it). These bytes are
the same, so either end may use the generated classes instead:

    tag | slot as varint | tag | length as varint | the bytes of the slot
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from eaas.wire.protobuf import bytes_tag, fields, number_tag, varint

if TYPE_CHECKING:
    from mmap import mmap

__all__ = ["EXCHANGE", "REQUEST_FRAMES", "RESPONSE_FRAMES", "Frame", "FrameCodec", "paste"]

EXCHANGE = "/eaas.rpc.v1.ExpertService/Exchange"
"""The method that these frames are of."""

_UINT32 = 0xFFFFFFFF


class Frame(NamedTuple):
    """What a frame says.

    Attributes:
        slot: Index within the connection.
        data: The slot's bytes, in the memory of the message that was read. Empty where there are none.
        connection_id: Of a client's first frame; empty in others.
    """

    slot: int
    data: memoryview
    connection_id: str


class FrameCodec:
    """Makes and reads the frames of one direction.

    Args:
        slot_field: Number of the slot's field in the message.
        data_field: That of the bytes.
        connection_field: That of the connection's id; 0 where the message has none.
    """

    def __init__(self, slot_field: int, data_field: int, connection_field: int = 0) -> None:
        self._slot_field = slot_field
        self._data_field = data_field
        self._connection_field = connection_field
        self._slot_tag = number_tag(slot_field)
        self._data_tag = bytes_tag(data_field)

    def encode(self, slot: int, buffer: mmap | bytearray, start: int, end: int) -> bytes:
        """The frame of a slot whose bytes are `buffer[start:end]`: one copy of them, and no other."""
        head = self._data_tag + varint(end - start)
        if slot:  # proto3 leaves zeros out.
            head = self._slot_tag + varint(slot) + head
        with memoryview(buffer) as whole, whole[start:end] as data:
            return b"".join((head, data))

    def decode(self, message: bytes) -> Frame:
        """Read a frame; its data is a view of the message. Fields that are not known are passed over.

        Raises:
            ValueError: Not a message of protobuf.
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
"""ExchangeRequest."""

RESPONSE_FRAMES = FrameCodec(slot_field=1, data_field=2)
"""ExchangeResponse."""


def paste(buffer: mmap | bytearray | memoryview, offset: int, data: memoryview) -> None:
    """Copy a frame's bytes to where they belong. Other threads run meanwhile."""
    # A slice assignment would hold the interpreter for the length of the copy.
    target = np.frombuffer(buffer, np.uint8, len(data), offset)
    np.copyto(target, np.frombuffer(data, np.uint8))
