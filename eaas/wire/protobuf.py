"""Protobuf's encoding by hand, because a generated class would copy megabytes twice on each side."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["bytes_tag", "fields", "number_tag", "varint"]

# Wire types of protobuf, without groups, which proto3 lacks.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED = {_FIXED64: 8, _FIXED32: 4}
_VARINT_BYTES = 10


def number_tag(field: int) -> bytes:
    """Encode the tag of a varint field (fields 1 to 15)."""
    return bytes([field << 3 | _VARINT])


def bytes_tag(field: int) -> bytes:
    """Encode the tag of a length-delimited field (fields 1 to 15)."""
    return bytes([field << 3 | _BYTES])


def varint(value: int) -> bytes:
    """Encode a non-negative integer as a varint, protobuf's number of variable length."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def fields(message: bytes) -> Iterator[tuple[int, int | memoryview]]:
    """Iterate over the varint and bytes fields of a protobuf message, as (field number, value).

    Bytes are views of the message.

    Raises:
        ValueError: The bytes are not a protobuf message.
    """
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


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    """Decode a varint; return its value and its end."""
    value = 0
    for shift, byte in enumerate(message[at : at + _VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, at + shift + 1
    raise ValueError("a number without an end")
