"""What a format tells of its matrices without reading them, and what reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eaas.checkpoint.header import TensorEntry
from eaas.checkpoint.quantized import WEIGHT_FORMATS, QuantizedMatrix, WeightFormat

if TYPE_CHECKING:
    import torch

__all__ = ["USUAL", "Reader", "StoredFormat", "StoredMatrix", "Tensors", "Unreadable", "parts_of"]

Tensors = Mapping[str, TensorEntry]
"""Name -> header entry of every tensor of a checkpoint."""


class Unreadable(ValueError):
    """Stored tensors do not make a matrix; says why. The caller names the tensor."""


@dataclass(frozen=True)
class StoredFormat:
    """Number format of matrices, as kernels tell them apart.

    Attributes:
        format: Format of the codes.
        group: Inputs per scale; 0: one scale per channel.
        has_zeros: Whether there are zero points.
        has_order: Whether the inputs are reordered.
        has_short_scales: Whether each scale is a bfloat16.
    """

    format: WeightFormat
    group: int
    has_zeros: bool = False
    has_order: bool = False
    has_short_scales: bool = False

    def __str__(self) -> str:
        scales = f"groups of {self.group}" if self.group else "a scale per channel"
        zeros = ", zero points" if self.has_zeros else ""
        order = ", reordered inputs" if self.has_order else ""
        return f"{self.format} ({scales}{zeros}{order})"

    def nbytes(self, *shape: int) -> int:
        """Return the bytes of weights of a shape (..., K): codes and scales, without zero points."""
        *outer, inputs = shape or (1,)
        code, channels = self.format, math.prod(outer)
        groups = -(-channels // code.block[0]) * -(-inputs // (self.group or inputs))
        scale = 1 if code.has_exponents else 2 if self.has_short_scales else 4
        return -(-channels * inputs * code.bits // 8) + groups * scale


USUAL = {code.name: StoredFormat(code, code.block[1]) for code in WEIGHT_FORMATS}
"""Each code with its usual scales, by its name."""


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """A quantised matrix of a checkpoint: (N, K), or (E, N, K) with a matrix for each expert.

    Attributes:
        name: Name of the weight that the model expects, without a suffix of the format.
        stored: Its number format.
        shape: Sizes of the weight.
        parts: Part of the format, such as "scale" -> name of the stored tensor.
        assemble: Makes a matrix (N, K) from the tensors of its parts; raises Unreadable.
    """

    name: str
    stored: StoredFormat
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    assemble: Callable[[Mapping[str, torch.Tensor]], QuantizedMatrix]


Reader = Callable[[Mapping[str, Any], Tensors], Iterator[StoredMatrix]]
"""Finds the matrices of a format, from the section that tells it (`quantization_config`) and the tensors.

Raises Unreadable: the section has a variant that is not supported, or tensors that do not fit it.
"""


def parts_of(
    module: str, names: tuple[str, ...], tensors: Mapping[str, TensorEntry]
) -> dict[str, str]:
    """Return the stored tensors of a module: part -> name. Raises Unreadable if one is missing."""
    parts = {part: f"{module}.{part}" for part in names}
    for name in parts.values():
        if name not in tensors:
            raise Unreadable(f"{module} has no {name}")
    return parts
