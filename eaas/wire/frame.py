"""Frames of the grpc transport: protobuf's bytes of an Exchange message, made and read without its copies.

A generated class copies a slot's bytes twice on each side (into the message and out of it). These bytes are
the same, so either end may use the generated classes instead:

    tag | slot as varint | tag | length as varint | the bytes of the slot
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from mmap import mmap

__all__ = ["EXCHANGE", "REQUEST_FRAMES", "RESPONSE_FRAMES", "Frame", "FrameCodec", "paste"]

EXCHANGE = "/eaas.rpc.v1.ExpertService/Exchange"
"""The method that these frames are of."""

# Wire types of protobuf's encoding. Groups are not: no message of proto3 has any.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_VARINT_BYTES = 10
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
        self._slot_tag = bytes([slot_field << 3 | _VARINT])
        self._data_tag = bytes([data_field << 3 | _BYTES])

    def encode(self, slot: int, buffer: mmap | bytearray, start: int, end: int) -> bytes:
        """The frame of a slot whose bytes are `buffer[start:end]`: one copy of them, and no other."""
        head = self._data_tag + _varint(end - start)
        if slot:  # proto3 leaves zeros out.
            head = self._slot_tag + _varint(slot) + head
        with memoryview(buffer) as whole, whole[start:end] as data:
            return b"".join((head, data))

    def decode(self, message: bytes) -> Frame:
        """Read a frame; its data is a view of the message. Fields that are not known are passed over.

        Raises:
            ValueError: Not a message of protobuf.
        """
        slot, data, connection_id = 0, memoryview(b""), ""
        for field, value in _fields(message):
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


def paste(buffer: mmap | bytearray, offset: int, data: memoryview) -> None:
    """Copy a frame's bytes to where they belong. Other threads run meanwhile."""
    # A slice assignment would hold the interpreter for the length of the copy.
    target = np.frombuffer(buffer, np.uint8, len(data), offset)
    np.copyto(target, np.frombuffer(data, np.uint8))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends."""
    value = 0
    for shift, byte in enumerate(message[at : at + _VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, at + shift + 1
    raise ValueError("a number without an end")


def _fields(message: bytes) -> Iterator[tuple[int, int | memoryview]]:
    """Numbers and values of the fields with numbers or bytes in them."""
    at, end, view = 0, len(message), memoryview(message)
    while at < end:
        tag, at = _read_varint(message, at)
        field, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            number, at = _read_varint(message, at)
            yield field, number
            continue
        if wire_type == _BYTES:
            length, at = _read_varint(message, at)
        elif wire_type in _FIXED:
            length = _FIXED[wire_type]
        else:
            raise ValueError(f"wire type {wire_type} in field {field}")
        if length > end - at:
            raise ValueError(f"field {field} of {length} bytes, {end - at} are there")
        if wire_type == _BYTES:
            yield field, view[at : at + length]
        at += length
