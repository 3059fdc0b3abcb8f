"""Quantised weights of a checkpoint, read on demand: as they are stored, or dequantised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import TYPE_CHECKING

from eaas.checkpoint.formats import StoredMatrix
from eaas.checkpoint.formats.stored import Unreadable
from eaas.checkpoint.pieces import Look, Pause, at_once, unseen
from eaas.checkpoint.quantized import DAMAGED, QuantizedMatrix
from eaas.checkpoint.shard import TensorSlice
from eaas.errors import CorruptShardError
from eaas.log import one_line

if TYPE_CHECKING:
    import torch

__all__ = ["QuantizedSlice"]


def _new_memory(nbytes: int) -> torch.Tensor:
    import torch

    return torch.empty(nbytes, dtype=torch.uint8)


@dataclass(frozen=True)
class QuantizedSlice:
    """A quantised weight of a checkpoint: (N, K), or (E, N, K) with a matrix for each expert.

    It has what transformers uses of a `TensorSlice` (`[...]`, `[a:b]`, `get_shape`, `get_dtype`), and is
    float32 there.

    Attributes:
        matrix: How it is stored.
        parts: Part of the format -> slice of the stored tensor.
        shape: Sizes of the weight.
    """

    matrix: StoredMatrix
    parts: Mapping[str, TensorSlice]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the stored tensors, in bytes."""
        return sum(part.nbytes for part in self.parts.values())

    def get_shape(self) -> list[int]:
        """Sizes of all dimensions of the weight."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """safetensors' name of the dtype of the dequantised weight."""
        return "F32"

    def row(self, index: int) -> QuantizedSlice:
        """Return the matrix of one expert of (E, N, K)."""
        parts = {name: part.row(index) for name, part in self.parts.items()}
        return replace(self, parts=parts, shape=self.shape[1:])

    def __getitem__(self, item: EllipsisType | slice) -> torch.Tensor:
        """Read and dequantise the whole weight, or consecutive rows of it. Raises the errors of `read`."""
        import torch

        if len(self.shape) > 2:
            experts = range(self.shape[0])[slice(None) if item is Ellipsis else item]
            return torch.stack([self.row(expert)[...] for expert in experts])
        weights_NK = self.read().dequantize()
        return weights_NK if item is Ellipsis else weights_NK[item]

    def read(
        self,
        pause: Pause = at_once,
        look: Look = unseen,
        allocate: Callable[[int], torch.Tensor] = _new_memory,
    ) -> QuantizedMatrix:
        """Read a matrix (N, K) as it is stored, and check its scales.

        Args:
            pause: Called before each piece.
            look: Called with each piece after it was read.
            allocate: Returns memory for some bytes, which the matrix may keep.

        Raises:
            CorruptShardError: A tensor cannot be read, the tensors do not fit one another, or a scale is no
                finite number.
        """
        tensors = {}
        for name, part in self.parts.items():
            raw = allocate(part.nbytes)
            part.read_into(raw.numpy().data, pause, look)
            tensors[name] = raw.view(part.dtype).view(part.shape)
        first = next(iter(self.parts.values()))
        try:
            matrix = self.matrix.assemble(tensors)
            matrix.check(f"{first.shard.place}: tensor {first.key}")
        except (Unreadable, RuntimeError) as error:
            raise CorruptShardError(
                f"{first.shard.place}: tensor {first.key}: {one_line(error)}: {DAMAGED}"
            ) from error
        return matrix
