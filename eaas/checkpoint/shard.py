"""Shards as open files: what is asked for is read, and nothing is mapped.

A mapping would count as this process's memory for as long as it stands, be charged in full where the
kernel does not overcommit, and end the process (SIGBUS) where the file shrinks under it. A read puts
the bytes where they are wanted, without the GIL, or says that they are not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from eaas.checkpoint.pieces import Look, Pause, at_once, pieces, unseen
from eaas.errors import CorruptShardError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

__all__ = ["Shard", "ShardHeader", "TensorSlice", "prefetch"]

_LENGTH = struct.Struct("<Q")
_TORCH_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


@dataclass(frozen=True)
class ShardHeader:
    """What a shard's header says.

    Attributes:
        digest: SHA-256 of its bytes.
        tensors: Tensor name -> dtype, shape and data_offsets, as safetensors has them.
        data_begin: Where the data begins in the file.
        file_bytes: Where the data and the file end.
    """

    digest: bytes
    tensors: Mapping[str, Any]
    data_begin: int
    file_bytes: int


class Shard:
    """A safetensors file, open until nobody refers to it or to a slice of it.

    Args:
        path: The file.
        known: Its header, if it was read before: it is parsed again only where it has changed, since
            json holds the GIL for milliseconds where there are thousands of tensors.

    Raises:
        OSError: It cannot be opened or read.
        ValueError: It is no whole safetensors file.
    """

    def __init__(self, path: Path, known: ShardHeader | None = None) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        self.header = self._read_header(known)

    def slice(self, key: str) -> TensorSlice:
        """A tensor that is read when it is asked for. Raises KeyError for an unknown name."""
        fields = self.header.tensors[key]
        begin, end = fields["data_offsets"]
        offset = self.header.data_begin + begin
        return TensorSlice(self, key, tuple(fields["shape"]), offset, end - begin)

    def read_into(
        self, buffer: memoryview, offset: int, pause: Pause = at_once, look: Look = unseen
    ) -> None:
        """Fills the buffer from a place of the file, with a pause before each piece and a look at it.

        Raises OSError or ValueError if it cannot.
        """
        for first, end in pieces(len(buffer)):
            pause()
            begin = first
            while begin < end:
                count = os.preadv(self._fd, [buffer[begin:end]], offset + begin)
                if not count:
                    raise ValueError(f"the file ends at byte {offset + begin}")
                begin += count
            look(buffer[first:end])

    def prefetch(self, places: Sequence[tuple[int, int]], pause: Pause = at_once) -> None:
        """Bytes that are read soon, (offset, count) each: the system may get them while the caller does
        something else.
        """
        for offset, count in places:
            for begin, end in pieces(count):
                pause()
                os.posix_fadvise(self._fd, offset + begin, end - begin, os.POSIX_FADV_WILLNEED)

    def _read_header(self, known: ShardHeader | None) -> ShardHeader:
        file_bytes = os.fstat(self._fd).st_size
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, 0, file_bytes))
        text = self._read(length, _LENGTH.size, file_bytes)
        digest = hashlib.sha256(text).digest()
        if known is None or known.digest != digest:
            tensors = json.loads(text)
            tensors.pop("__metadata__", None)
            begin = _LENGTH.size + length
            end = begin + max((t["data_offsets"][1] for t in tensors.values()), default=0)
            known = ShardHeader(digest, tensors, begin, end)
        if known.file_bytes != file_bytes:
            raise ValueError(f"{file_bytes} bytes, the header says {known.file_bytes}")
        return known

    def _read(self, count: int, offset: int, file_bytes: int) -> bytearray:
        if offset + count > file_bytes:
            raise ValueError(f"{count} bytes at {offset} of {file_bytes}")
        data = bytearray(count)
        self.read_into(memoryview(data), offset)
        return data


@dataclass(frozen=True)
class TensorSlice:
    """A tensor of a shard, or successive rows of it, that is read when it is asked for.

    `[...]`, `[a:b]`, `get_shape` and `get_dtype` are what transformers uses of safetensors' slices.

    Attributes:
        shard: Where it is.
        key: The tensor's name.
        shape: Sizes of all dimensions.
        offset: Where its bytes begin in the shard.
        nbytes: How many they are.
    """

    shard: Shard
    key: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype:
        """Raises UnsupportedModelError if torch has no such dtype."""
        import torch

        if self.get_dtype() not in _TORCH_DTYPES:
            raise UnsupportedModelError(
                f"{self.shard.path}: tensor {self.key} is {self.get_dtype()}, which torch lacks: "
                "convert the checkpoint first"
            )
        dtype: torch.dtype = getattr(torch, _TORCH_DTYPES[self.get_dtype()])
        return dtype

    def get_shape(self) -> list[int]:
        """Sizes of all dimensions."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """safetensors' name of the dtype."""
        return str(self.shard.header.tensors[self.key]["dtype"])

    def row(self, index: int) -> TensorSlice:
        """One row of the first dimension, without that dimension."""
        rows = self._rows(index, index + 1)
        return replace(rows, shape=rows.shape[1:])

    def __getitem__(self, item: EllipsisType | slice) -> torch.Tensor:
        """All of it, or successive rows, in memory of their own. Raises as `read_into` does."""
        import torch

        first, last, _ = (0, 0, 0) if item is Ellipsis else item.indices(self.shape[0])
        part = self if item is Ellipsis else self._rows(first, max(first, last))
        raw = torch.empty(part.nbytes, dtype=torch.uint8)
        part.read_into(raw.numpy().data)
        return raw.view(part.dtype).view(part.shape)

    def read_into(self, buffer: memoryview, pause: Pause = at_once, look: Look = unseen) -> None:
        """Reads all of it into a buffer of `nbytes`, with a pause before each piece and a look at it.

        Raises CorruptShardError, naming the file and the tensor, where that cannot be done.
        """
        try:
            self.shard.read_into(buffer, self.offset, pause, look)
        except (OSError, ValueError) as error:
            raise CorruptShardError(
                f"{self.shard.path}: tensor {self.key} cannot be read ({error}): "
                "fetch the shard again"
            ) from error

    def _rows(self, first: int, last: int) -> TensorSlice:
        row_bytes = self.nbytes // max(1, self.shape[0])
        return replace(
            self,
            shape=(last - first, *self.shape[1:]),
            offset=self.offset + first * row_bytes,
            nbytes=(last - first) * row_bytes,
        )


def prefetch(slices: Iterable[TensorSlice], pause: Pause = at_once) -> None:
    """They are read soon, all of them: the system may get them while the caller does something else."""
    places: dict[Shard, list[tuple[int, int]]] = {}
    for part in slices:
        places.setdefault(part.shard, []).append((part.offset, part.nbytes))
    for shard, wanted in places.items():
        shard.prefetch(sorted(wanted), pause)
