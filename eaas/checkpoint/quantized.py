"""Quantised weight matrices, as a checkpoint stores them: codes, and scales for groups of inputs.

N output channels, K inputs, G groups. The readers of `eaas.checkpoint.formats` make these matrices from the
tensors of each published format; an expert server packs them for its kernel without dequantising them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING

from eaas.errors import CorruptShardError

if TYPE_CHECKING:
    import torch

__all__ = ["DAMAGED", "QuantizedMatrix", "WeightFormat", "concatenate"]

DAMAGED = "if the shard is not as published (SHA-256), download it again, else use another version"
"""Remedy for numbers that no weight has: this copy is damaged, or was published so."""


class WeightFormat(StrEnum):
    """Format of the codes of a quantised matrix."""

    FP8 = "fp8"  # e4m3
    MXFP4 = "mxfp4"  # e2m1, a power of two (e8m0) for 32 inputs
    INT8 = "int8"
    INT4 = "int4"

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self in (WeightFormat.MXFP4, WeightFormat.INT4) else 8

    @property
    def zero(self) -> int:
        """Code of 0 in a matrix without zero points: codes of integers are unsigned."""
        return {WeightFormat.INT8: 128, WeightFormat.INT4: 8}.get(self, 0)


# Values of the 4-bit codes e2m1 (OCP Microscaling Formats 1.0, 5.3.3); the upper half is negative.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_NAN = 255


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A weight matrix (N, K): weight[n, order[k]] = scale[n, k // group] * (value(code[n, k]) - zero).

    `value` is the integer itself, or the number that the floating-point code stands for.

    Attributes:
        format: Format of the codes.
        inputs: K.
        group: Inputs per scale; K if a channel has one scale. The last group may be shorter.
        codes: uint8, (N, K), or (N, ceil(K / 2)) for 4 bits: input 2i is in the lower half of byte i.
        scales: (N, G): float32, or the exponents (uint8, e8m0) of MXFP4.
        zeros: uint8 (N, G), or None: `format.zero` everywhere. Integers only.
        order: int64 (K): the input that column k of the codes belongs to (GPTQ's `desc_act`). None: k.
    """

    format: WeightFormat
    inputs: int
    group: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weights."""
        return len(self.codes), self.inputs

    @property
    def nbytes(self) -> int:
        """Memory of codes, scales and zero points, in bytes."""
        return sum(
            part.nbytes for part in (self.codes, self.scales, self.zeros) if part is not None
        )

    def check(self, name: str) -> None:
        """Check that every scale and code is a number.

        Raises:
            CorruptShardError: One is NaN or infinite; names the tensor.
        """
        if self.format is WeightFormat.MXFP4:
            is_number = bool((self.scales != _E8M0_NAN).all())
        else:
            is_number = bool(self.scales.isfinite().all())
        if not is_number:
            raise CorruptShardError(f"{name}: a scale is NaN or infinite: {DAMAGED}")
        if self.format is WeightFormat.FP8 and bool(((self.codes & 0x7F) == 0x7F).any()):
            raise CorruptShardError(f"{name}: a weight is NaN: {DAMAGED}")

    def values(self) -> torch.Tensor:
        """Return the codes' values without scale and zero: float32 (N, K), in the order of the codes."""
        import torch

        if self.format is WeightFormat.FP8:
            return self.codes.view(torch.float8_e4m3fn).float()
        if self.format.bits == 8:
            return self.codes.float()
        codes_NK = torch.stack((self.codes & 15, self.codes >> 4), 2).flatten(1)[:, : self.inputs]
        if self.format is WeightFormat.MXFP4:
            return _e2m1()[codes_NK.long()]
        return codes_NK.float()

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the weights (N, K), computed in float32 (float64, if that is the dtype) and rounded once."""
        import torch

        wanted = dtype or torch.float32
        exact = torch.promote_types(wanted, torch.float32)
        weights_NK = self.values().to(exact) - self._by_input(self._zeros()).to(exact)
        weights_NK *= self._by_input(self._scales(exact))
        if self.order is not None:
            weights_NK = weights_NK[:, torch.argsort(self.order)]
        return weights_NK.to(wanted)

    def rows(self, rows: torch.Tensor | slice) -> QuantizedMatrix:
        """Return some output channels, in the order given."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=zeros)

    def _scales(self, dtype: torch.dtype) -> torch.Tensor:
        import torch

        if self.format is not WeightFormat.MXFP4:
            return self.scales.to(dtype)
        # The exponents of a float32; 2^-127 is subnormal.
        bits = (self.scales.to(torch.int32) << 23).where(self.scales != 0, 1 << 22)
        return bits.view(torch.float32).to(dtype)

    def _zeros(self) -> torch.Tensor:
        import torch

        if self.zeros is None:
            return torch.full(self.scales.shape, self.format.zero, dtype=torch.uint8)
        return self.zeros

    def _by_input(self, of_group_NG: torch.Tensor) -> torch.Tensor:
        return of_group_NG.repeat_interleave(self.group, dim=1)[:, : self.inputs]


def concatenate(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Put matrices of one format, shape and order of inputs one below the other: an expert's gate and up.

    Raises:
        ValueError: They differ.
    """
    import torch

    first = parts[0]
    if len(parts) == 1:
        return first
    if len({(each.format, each.inputs, each.group, each.scales.shape[1]) for each in parts}) > 1:
        raise ValueError("its parts have different formats")
    orders = [each.order for each in parts]
    if any(order is not None for order in orders) and not all(
        order is not None and first.order is not None and torch.equal(order, first.order)
        for order in orders
    ):
        raise ValueError("its parts have different orders of inputs (g_idx)")
    zeros = None
    if any(each.zeros is not None for each in parts):
        zeros = torch.cat([each._zeros() for each in parts])
    return replace(
        first,
        codes=torch.cat([each.codes for each in parts]),
        scales=torch.cat([each.scales for each in parts]),
        zeros=zeros,
    )


@cache
def _e2m1() -> torch.Tensor:
    import torch

    return torch.tensor([*_E2M1, *(-value for value in _E2M1)])
