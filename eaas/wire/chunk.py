"""Chunks of checkpoint shards between expert servers (ReadShardResponse), without protobuf's copies."""

from __future__ import annotations

from typing import NamedTuple

from eaas.wire.protobuf import bytes_tag, fields, number_tag, varint

__all__ = ["Chunk", "decode_chunk", "encode_chunk"]

_OFFSET, _DATA, _DIGEST = 1, 2, 4
_UINT64 = (1 << 64) - 1
_EMPTY = memoryview(b"")


class Chunk(NamedTuple):
    """One message of a ReadShard stream: consecutive bytes of a checkpoint shard.

    Attributes:
        offset: Offset of the first byte in the shard.
        data: View of the message's bytes; empty in the last message.
        digest: Digest of all requested bytes; only in the last message.
    """

    offset: int
    data: memoryview
    digest: bytes


def encode_chunk(offset: int, data: bytes = b"", digest: bytes = b"") -> bytes:
    """Encode a ReadShardResponse on the server that shares its checkpoint, with one copy of the data."""
    parts = [number_tag(_OFFSET), varint(offset)] if offset else []  # proto3 omits zeros
    for field, value in ((_DATA, data), (_DIGEST, digest)):
        if value:
            parts += [bytes_tag(field), varint(len(value)), value]
    return b"".join(parts)


def decode_chunk(message: bytes) -> Chunk:
    """Decode a ReadShardResponse on the server that loads; its data is a view. Ignores unknown fields.

    Raises:
        ValueError: The bytes are not a protobuf message.
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
