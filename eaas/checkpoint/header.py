"""The header of a safetensors file, read and validated without torch.

A safetensors file is

    u64 n | n bytes of JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}} | data

with offsets relative to the start of the data, without gaps or overlaps.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from eaas.checkpoint.source import Source
from eaas.checkpoint.text_files import LFS_POINTER, lfs_pointer
from eaas.errors import CorruptShardError, MissingShardError
from eaas.hub_cache import complete_download

__all__ = ["ShardHeader", "TensorEntry", "read_header"]

_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor's location in a safetensors file, its dtype (safetensors' name) and its shape.

    Attributes:
        shard: Name of the file.
        offset: First byte in the file.
        nbytes: Size in bytes.
    """

    shard: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ShardHeader:
    """The validated header of a safetensors shard.

    Attributes:
        tensors: Tensor name -> entry.
        nbytes: Bytes before the data.
        file_bytes: Size of the file.
        digest: SHA-256 of the bytes before the data.
    """

    tensors: Mapping[str, TensorEntry]
    nbytes: int
    file_bytes: int
    digest: bytes


def read_header(source: Source, shard: str) -> ShardHeader:
    """Read a safetensors shard's header, and check that it matches the file; the data is not read.

    Raises:
        MissingShardError: There is no such file.
        CorruptShardError: The header is malformed or does not match the file.
        CheckpointError: It is a pointer of Git LFS.
        OSError: The file cannot be read.
    """

    def corrupt(what: str) -> CorruptShardError:
        return CorruptShardError(f"{source.place(shard)}: {what}: download the shard again")

    size = source.size(shard)
    if size is None:
        raise MissingShardError(
            f"{source.place(shard)} is missing: {complete_download(str(source))}"
        )
    if size < 8:
        raise corrupt(f"{size} bytes are not a safetensors file")
    prefix = bytearray(8)
    try:
        source.read(shard, 0, memoryview(prefix))
        if LFS_POINTER.startswith(prefix):
            raise lfs_pointer(source.place(shard))
        (length,) = struct.unpack("<Q", prefix)
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise corrupt(f"header of {length} bytes in a file of {size}")
        text = bytearray(length)
        source.read(shard, 8, memoryview(text))
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise corrupt(f"header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise corrupt("header is not a JSON object")
    header.pop("__metadata__", None)

    data_bytes = size - 8 - length
    entries: dict[str, TensorEntry] = {}
    places: list[tuple[int, int, str]] = []
    for name, fields in header.items():
        try:
            dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
            bits = _BITS[dtype] * math.prod(shape)
        except (KeyError, TypeError, ValueError) as error:
            raise corrupt(f"tensor {name} has an invalid entry ({error!r})") from error
        if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
            raise corrupt(f"tensor {name} has shape {shape}, offsets {begin}..{end}")
        if bits != 8 * (end - begin):
            raise corrupt(f"tensor {name} ({dtype} {shape}) does not fit offsets {begin}..{end}")
        if end > data_bytes:
            raise corrupt(f"tensor {name} ends at byte {end} of {data_bytes} (truncated)")
        entries[name] = TensorEntry(
            shard, dtype, tuple(shape), size - data_bytes + begin, end - begin
        )
        places.append((begin, end, name))

    position = 0
    for begin, end, name in sorted(places):
        if begin != position:
            raise corrupt(f"tensor {name} begins at byte {begin}, not {position}")
        position = end
    if position != data_bytes:
        raise corrupt(f"{data_bytes - position} bytes belong to no tensor")
    return ShardHeader(entries, 8 + length, size, hashlib.sha256(prefix + text).digest())
