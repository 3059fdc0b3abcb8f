"""Chunks of a shard: protobuf's bytes of a ReadShardResponse, made and read without its copies."""

from __future__ import annotations

from typing import NamedTuple

from eaas.wire.protobuf import bytes_tag, fields, number_tag, varint

__all__ = ["Chunk", "decode_chunk", "encode_chunk"]

_OFFSET, _DATA, _DIGEST = 1, 2, 4
_UINT64 = (1 << 64) - 1
_EMPTY = memoryview(b"")


class Chunk(NamedTuple):
    """What a message of the stream says.

    Attributes:
        offset: Place of the first byte in the shard.
        data: The bytes, in the memory of the message. Empty in the last one.
        digest: Of all that was asked for, in the last one; empty in others.
    """

    offset: int
    data: memoryview
    digest: bytes


def encode_chunk(offset: int, data: bytes = b"", digest: bytes = b"") -> bytes:
    """The message: one copy of the data, and no other."""
    parts = [number_tag(_OFFSET), varint(offset)] if offset else []  # proto3 leaves zeros out
    for field, value in ((_DATA, data), (_DIGEST, digest)):
        if value:
            parts += [bytes_tag(field), varint(len(value)), value]
    return b"".join(parts)


def decode_chunk(message: bytes) -> Chunk:
    """Reads a message; its data is a view of it. Fields that are not known are passed over.

    Raises:
        ValueError: Not a message of protobuf.
    """
    offset, data, digest = 0, _EMPTY, b""
    for field, value in fields(message):
        if isinstance(value, int):
            if field == _OFFSET:
                offset = value & _UINT64
        elif field == _DATA:
            data = value
        elif field == _DIGEST:
            digest = bytes(value)
    return Chunk(offset, data, digest)
