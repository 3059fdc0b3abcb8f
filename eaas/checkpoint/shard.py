"""Safetensors shards whose tensors are read on demand, without memory mapping.

A memory mapping counts as memory of the process, is charged in full without overcommit, and kills the process
(SIGBUS) if the file shrinks. A read copies the bytes to their destination without the GIL, or raises an
error.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING

from eaas.checkpoint.header import ShardHeader
from eaas.checkpoint.pieces import Look, Pause, at_once, pieces, unseen
from eaas.errors import CorruptShardError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

__all__ = ["LocalShard", "Shard", "TensorSlice", "prefetch"]

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


class Shard(ABC):
    """A safetensors file whose tensors are read on demand.

    Args:
        name: Name of the file.
        place: Names the file in messages.
        header: Its header.
    """

    def __init__(self, name: str, place: str, header: ShardHeader) -> None:
        self.name = name
        self.place = place
        self.header = header

    def slice(self, key: str) -> TensorSlice:
        """Return a tensor of the shard; its bytes are read when it is used. Raises KeyError if unknown."""
        entry = self.header.tensors[key]
        return TensorSlice(self, key, entry.shape, entry.offset, entry.nbytes)

    @abstractmethod
    def read_into(
        self, buffer: memoryview, offset: int, pause: Pause = at_once, look: Look = unseen
    ) -> None:
        """Fill a buffer from an offset of the file; call `pause` before and `look` after each piece.

        Raises OSError, ValueError or CheckpointError.
        """

    @abstractmethod
    def prefetch(self, places: Sequence[tuple[int, int]], pause: Pause = at_once) -> None:
        """Start to read these ranges (offset, count; ascending), so that `read_into` waits less."""


class LocalShard(Shard):
    """A local file, open until the last reference to it or to its slices is dropped.

    Args:
        path: The file.
        header: Its header.

    Raises:
        OSError: The file cannot be opened or read.
        ValueError: It has changed since its header was read.
    """

    def __init__(self, path: Path, header: ShardHeader) -> None:
        super().__init__(path.name, str(path), header)
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        # Not parsed again, because with thousands of tensors json holds the GIL for milliseconds.
        begin = bytearray(header.nbytes)
        self.read_into(memoryview(begin), 0)
        file_bytes = os.fstat(self._fd).st_size
        if file_bytes != header.file_bytes or hashlib.sha256(begin).digest() != header.digest:
            raise ValueError("it has changed since the checkpoint was opened")

    def read_into(
        self, buffer: memoryview, offset: int, pause: Pause = at_once, look: Look = unseen
    ) -> None:
        """Fill a buffer from an offset of the file. Raises OSError or ValueError."""
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
        """Ask the operating system to read these ranges ahead."""
        for offset, count in places:
            for begin, end in pieces(count):
                pause()
                os.posix_fadvise(self._fd, offset + begin, end - begin, os.POSIX_FADV_WILLNEED)


@dataclass(frozen=True)
class TensorSlice:
    """A tensor of a shard, or consecutive rows of it, read from the file on demand.

    transformers uses `[...]`, `[a:b]`, `get_shape` and `get_dtype`.

    Attributes:
        shard: The shard.
        key: Name of the tensor.
        shape: Sizes of all dimensions.
        offset: First byte in the shard.
        nbytes: Size in bytes.
    """

    shard: Shard
    key: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype:
        """Torch dtype of the tensor. Raises UnsupportedModelError if torch lacks it."""
        import torch

        if self.get_dtype() not in _TORCH_DTYPES:
            raise UnsupportedModelError(
                f"{self.shard.place}: tensor {self.key} is {self.get_dtype()}, which torch lacks: "
                "convert the checkpoint first"
            )
        dtype: torch.dtype = getattr(torch, _TORCH_DTYPES[self.get_dtype()])
        return dtype

    def get_shape(self) -> list[int]:
        """Sizes of all dimensions of the tensor (an interface that transformers uses)."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """safetensors' name of the tensor's dtype (an interface that transformers uses)."""
        return self.shard.header.tensors[self.key].dtype

    def row(self, index: int) -> TensorSlice:
        """Return one row of the first dimension (one expert of many) as a slice without that dimension."""
        rows = self._rows(index, index + 1)
        return replace(rows, shape=rows.shape[1:])

    def __getitem__(self, item: EllipsisType | slice) -> torch.Tensor:
        """Read the whole tensor, or consecutive rows, into a new tensor. Raises the errors of `read_into`."""
        import torch

        first, last, _ = (0, 0, 0) if item is Ellipsis else item.indices(self.shape[0])
        part = self if item is Ellipsis else self._rows(first, max(first, last))
        raw = torch.empty(part.nbytes, dtype=torch.uint8)
        part.read_into(raw.numpy().data)
        return raw.view(part.dtype).view(part.shape)

    def read_into(self, buffer: memoryview, pause: Pause = at_once, look: Look = unseen) -> None:
        """Read the whole tensor into a buffer of `nbytes`; call `pause` before and `look` after each piece.

        Raises CorruptShardError.
        """
        try:
            self.shard.read_into(buffer, self.offset, pause, look)
        except (OSError, ValueError) as error:
            raise CorruptShardError(
                f"{self.shard.place}: tensor {self.key} cannot be read ({error}): "
                "download the shard again"
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
    """Start to read these slices: the next experts while others are loaded."""
    places: dict[Shard, list[tuple[int, int]]] = {}
    for part in slices:
        places.setdefault(part.shard, []).append((part.offset, part.nbytes))
    for shard, wanted in places.items():
        shard.prefetch(sorted(wanted), pause)
