"""What all kernels that pack experts ask of an expert's matrices: their format, their gate and their rows."""

from __future__ import annotations

from typing import Any

import torch

from eaas.checkpoint.quantized import QuantizedMatrix
from eaas.errors import CheckpointError
from expert_server.kernels.activation import Activation
from expert_server.kernels.kernel import StoredFormat

__all__ = ["Matrix", "check_format", "rows_of", "split_gate"]

Matrix = torch.Tensor | QuantizedMatrix


def check_format(matrix: Matrix, stored: StoredFormat | None) -> None:
    """Check that a matrix has the format that the kernel was made for. Raises CheckpointError."""
    if isinstance(matrix, torch.Tensor):
        found = None if stored is None else str(matrix.dtype).removeprefix("torch.")
    else:
        group = matrix.group if matrix.scales.shape[1] > 1 else 0
        is_alike = (
            stored is not None
            and matrix.format is stored.format
            and group in (0, stored.group)
            and (matrix.zeros is None or stored.has_zeros)
        )
        found = (
            None if is_alike else str(StoredFormat(matrix.format, group, matrix.zeros is not None))
        )
    if found is not None:
        wanted = stored or "weights that are not quantised"
        raise CheckpointError(
            f"a weight matrix is {found} where the kernel expects {wanted}: quantise all routed experts alike"
        )


def split_gate(up: Matrix | None, activation: Activation) -> list[Any]:
    """Split an up matrix or bias: (2I, ...) -> gate (I, ...), up (I, ...); without a gate only up."""
    if up is None:
        return []
    if not activation.has_gate:
        return [up]
    if activation.is_interleaved:
        return [rows_of(up, slice(0, None, 2)), rows_of(up, slice(1, None, 2))]
    half = up.shape[0] // 2
    return [rows_of(up, slice(0, half)), rows_of(up, slice(half, None))]


def rows_of(matrix: Matrix, rows: slice | torch.Tensor) -> Matrix:
    """Return some output channels of a matrix."""
    return matrix.rows(rows) if isinstance(matrix, QuantizedMatrix) else matrix[rows]
