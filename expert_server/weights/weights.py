"""One expert's weights, as they come from a checkpoint, and how the experts of a layer compute.

H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from eaas.checkpoint.quantized import QuantizedMatrix

__all__ = ["ExpertForm", "ExpertWeights"]


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """One expert's weights. Shapes are for the plain layout; `is_transposed` swaps a tensor's two dimensions.

    A quantised matrix has the plain layout in every form, because a checkpoint stores it so.

    Attributes:
        up: `gate_up_proj` (2I, H), or `up_proj` (I, H) for an expert without a gate.
        down: `down_proj` (H, I).
        up_bias: (2I) or (I), or None.
        down_bias: (H), or None.
        digest: XXH3 (64 bits) of the expert's bytes in the checkpoint; 0 if it was not read from one.
    """

    up: torch.Tensor | QuantizedMatrix
    down: torch.Tensor | QuantizedMatrix
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    digest: int = 0

    @property
    def nbytes(self) -> int:
        """Memory of the expert's tensors, in bytes; it counts towards the loading rate."""
        tensors = (self.up, self.down, self.up_bias, self.down_bias)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def to(self, dtype: torch.dtype) -> ExpertWeights:
        """The same expert in another dtype, dequantised; tensors of that dtype are shared."""
        return self._each(lambda tensor: tensor.to(dtype), dtype)

    def copy(self, dtype: torch.dtype) -> ExpertWeights:
        """Copy the weights, dequantised and in that dtype, out of the reader's memory, which is reused."""
        return self._each(lambda tensor: tensor.to(dtype, copy=True), dtype)

    def plain(self, form: ExpertForm) -> ExpertWeights:
        """The weights as (out, in): up (2I, H) or (I, H), down (H, I). Views, not copies."""
        if not form.is_transposed:
            return self
        return replace(self, up=_turned(self.up), down=_turned(self.down))

    def dequantize(self, form: ExpertForm, dtype: torch.dtype) -> ExpertWeights:
        """Dequantise the matrices to that dtype and the layout of the form; tensors stay as they are."""

        def dense(matrix: torch.Tensor | QuantizedMatrix) -> torch.Tensor:
            if isinstance(matrix, torch.Tensor):
                return matrix
            left_NK = matrix.dequantize(dtype)
            return left_NK.t().contiguous() if form.is_transposed else left_NK

        return replace(self, up=dense(self.up), down=dense(self.down))

    def _each(
        self, change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
    ) -> ExpertWeights:
        up, down = (
            matrix.dequantize(dtype) if isinstance(matrix, QuantizedMatrix) else change(matrix)
            for matrix in (self.up, self.down)
        )
        up_bias, down_bias = (
            None if bias is None else change(bias) for bias in (self.up_bias, self.down_bias)
        )
        return ExpertWeights(up, down, up_bias, down_bias, self.digest)


def _turned(matrix: torch.Tensor | QuantizedMatrix) -> torch.Tensor | QuantizedMatrix:
    return matrix.t() if isinstance(matrix, torch.Tensor) else matrix


@dataclass(frozen=True)
class ExpertForm:
    """How the experts of one layer compute: gate, layout and activation.

    Attributes:
        has_gate: Whether `up` holds gate and up.
        is_transposed: Whether weights are (in, out) rather than (out, in).
        activate: From the up product to the down product's input: the model's `_apply_gate` or `act_fn`.
    """

    has_gate: bool
    is_transposed: bool
    activate: Callable[[torch.Tensor], torch.Tensor]
