"""Quantised weight matrices, as a checkpoint stores them: codes, and scales for groups of inputs.

N output channels, K inputs, G groups. The readers of `eaas.checkpoint.formats` make these matrices from the
tensors of each published format; an expert server packs them for its kernel without dequantising them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from eaas.errors import CorruptShardError

if TYPE_CHECKING:
    import torch

__all__ = [
    "DAMAGED",
    "FP8",
    "INT4",
    "INT8",
    "INTEGERS",
    "MXFP4",
    "WEIGHT_FORMATS",
    "QuantizedMatrix",
    "WeightFormat",
    "concatenate",
]

DAMAGED = "if the shard is not as published (SHA-256), download it again, else use another version"
"""Remedy for numbers that no weight has: this copy is damaged, or was published so."""


@dataclass(frozen=True)
class WeightFormat:
    """Format of the codes of a quantised matrix; all that Python code tells of it.

    Attributes:
        name: An expert server's compiled kernel decodes codes of this name in registers (`native/codes.h`).
            Codes of others become floats as the server loads them.
        bits: Bits of a code, 4 or 8.
        decode: Codes, uint8, -> their values without scale and zero, float32 of the same shape.
        zero: Code of 0 in a matrix without zero points. Codes of integers are unsigned: it is their middle.
        nans: Codes that are not a number.
        has_exponents: Whether scales are powers of two, given by their exponents (uint8, e8m0).
        block: Output channels and inputs that usually have one scale; 0 inputs: all.
    """

    name: str
    bits: int
    decode: Callable[[torch.Tensor], torch.Tensor] = field(repr=False)
    zero: int = 0
    nans: tuple[int, ...] = ()
    has_exponents: bool = False
    block: tuple[int, int] = (1, 0)

    def __str__(self) -> str:
        return self.name

    @property
    def is_integer(self) -> bool:
        """Whether codes are integers, which may have zero points."""
        return self.zero > 0


def _integers(codes: torch.Tensor) -> torch.Tensor:
    return codes.float()


def _e4m3(codes: torch.Tensor) -> torch.Tensor:
    import torch

    return codes.view(torch.float8_e4m3fn).float()


def _e2m1(codes: torch.Tensor) -> torch.Tensor:
    import torch

    # OCP Microscaling Formats 1.0, 5.3.3. The upper half of the codes is negative.
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.cat((values, -values))[codes.long()]


INT8 = WeightFormat("int8", 8, _integers, zero=128)
INT4 = WeightFormat("int4", 4, _integers, zero=8, block=(1, 128))
FP8 = WeightFormat("fp8", 8, _e4m3, nans=(0x7F, 0xFF), block=(128, 128))
MXFP4 = WeightFormat("mxfp4", 4, _e2m1, has_exponents=True, block=(1, 32))
WEIGHT_FORMATS = (INT8, INT4, FP8, MXFP4)
INTEGERS = {code.bits: code for code in WEIGHT_FORMATS if code.is_integer}
"""By their bits. Float weights can be quantised to them."""

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
        scales: (N, G): float32, or exponents (uint8, e8m0) if the format has them.
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
        finite = self.scales != _E8M0_NAN if self.format.has_exponents else self.scales.isfinite()
        if not bool(finite.all()):
            raise CorruptShardError(f"{name}: a scale is NaN or infinite: {DAMAGED}")
        if any(bool((self._unpacked() == code).any()) for code in self.format.nans):
            raise CorruptShardError(f"{name}: a weight is NaN: {DAMAGED}")

    def values(self) -> torch.Tensor:
        """Return the codes' values without scale and zero: float32 (N, K), in the order of the codes."""
        return self.format.decode(self._unpacked())

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

    def _unpacked(self) -> torch.Tensor:
        """The codes, a byte each: uint8 (N, K)."""
        import torch

        if self.format.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), 2).flatten(1)[:, : self.inputs]

    def _scales(self, dtype: torch.dtype) -> torch.Tensor:
        import torch

        if not self.format.has_exponents:
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
