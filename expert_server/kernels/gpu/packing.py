"""Packs an expert into one block of device memory for kernel `triton`, in pieces.

Rows of matrices are padded with zeros to a multiple of INNER inputs, so that device code needs no mask on
inputs. Scales have one row per group of inputs: neighbouring channels are neighbours in memory. Of 32 bytes
of MXFP4 codes the lower halves are 32 inputs and the upper halves the next 32: each has one scale, and no
value changes its place once decoded.

N output channels, K inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn import functional

from eaas.checkpoint.pieces import PIECE_BYTES, Pause, pieces
from eaas.checkpoint.quantized import DAMAGED, QuantizedMatrix, WeightFormat
from eaas.errors import CorruptShardError
from expert_server.kernels.activation import Activation
from expert_server.kernels.gpu.tiles import INNER, Coding
from expert_server.kernels.gpu.uploads import Uploads
from expert_server.kernels.kernel import KernelSpec, Quantization, UnsupportedError
from expert_server.kernels.matrices import Matrix, check_format, split_gate
from expert_server.weights.weights import ExpertWeights

__all__ = ["DeviceExpert", "Layout", "check_spec", "pack_expert", "padded"]

# Sections of a block begin at multiples of this, in bytes.
_ALIGNMENT = 256
_FP8_GROUP, _MXFP4_GROUP = 128, 32
_STORED = {WeightFormat.FP8: Coding.FP8, WeightFormat.MXFP4: Coding.MXFP4}
_CODE_BYTES = {Coding.BFLOAT16: 2, Coding.FLOAT32: 4, Coding.FP8: 1, Coding.MXFP4: 0.5}
# Of codes; those of floats have none.
_SCALE_BYTES = {Coding.FP8: 4, Coding.MXFP4: 1}
_E8M0_ONE, _E8M0_NAN = 127, 255


@dataclass(frozen=True)
class Layout:
    """Where the parts of an expert lie in its block; equal for all experts of a layer.

    Attributes:
        hidden, intermediate: H, I.
        coding: How the matrices are coded.
        group: Inputs per scale of FP8; 0: one scale per channel.
        has_bias: Whether both products have a bias.
        offsets: Bytes from the block's begin to up, down, scales of up, of down, biases of up, of down.
        nbytes: Bytes of the block.
    """

    hidden: int
    intermediate: int
    coding: Coding
    group: int
    has_bias: tuple[bool, bool]
    offsets: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, eq=False)
class DeviceExpert:
    """One expert in a block of device memory, uint8."""

    memory: torch.Tensor
    layout: Layout

    @property
    def nbytes(self) -> int:
        """Memory of the packed expert, in bytes, padding and scales included."""
        return self.memory.nbytes


def padded(inputs: int) -> int:
    """Inputs of a matrix's row in device memory."""
    return -(-inputs // INNER) * INNER


def check_spec(spec: KernelSpec) -> Coding:
    """Return how matrices are coded.

    Raises:
        UnsupportedError: The device code has no such weights.
    """
    if spec.dtype not in (torch.bfloat16, torch.float32):
        raise UnsupportedError(f"{spec.dtype} weights: this kernel supports float32 and bfloat16")
    if spec.quantization is not Quantization.NONE:
        raise UnsupportedError(f"this kernel does not quantise to {spec.quantization}")
    stored = spec.stored
    if stored is None:
        return Coding.BFLOAT16 if spec.dtype is torch.bfloat16 else Coding.FLOAT32
    coding = _STORED.get(stored.format)
    if coding is None or stored.has_zeros or stored.has_order:
        raise UnsupportedError(f"{stored}: of stored weights this kernel supports fp8 and mxfp4")
    if spec.dtype is not torch.bfloat16:
        raise UnsupportedError(f"{stored}: this kernel supports them in bfloat16 models only")
    unit = _FP8_GROUP if coding is Coding.FP8 else _MXFP4_GROUP
    if stored.group % unit or (coding is Coding.MXFP4 and stored.group != unit):
        wanted = f"groups of {unit}" if coding is Coding.MXFP4 else f"groups of multiples of {unit}"
        raise UnsupportedError(f"{stored}: this kernel supports {wanted}")
    return coding


def pack_expert(
    weights: ExpertWeights, activation: Activation, spec: KernelSpec, uploads: Uploads, pause: Pause
) -> DeviceExpert:
    """Pack an expert of the plain (out, in) layout; it is on the device once this returns.

    Args:
        weights: up (2I, H) or (I, H), down (H, I).
        activation: Defines how gate and up lie in `up`.
        spec: Number formats; `check_spec` accepts it.
        uploads: To the device that holds the block.
        pause: Called before each piece.

    Raises:
        CheckpointError: A scale is NaN or infinite, or a matrix has another format than `spec.stored`.
        torch.OutOfMemoryError: The device has no memory for the block.
    """
    for matrix in (weights.up, weights.down):
        check_format(matrix, spec.stored)
    ups, biases = split_gate(weights.up, activation), split_gate(weights.up_bias, activation)
    downs, down_biases = [weights.down], _some(weights.down_bias)
    packing = _Packing(spec, uploads, pause)
    sizes = [
        packing.matrix_bytes(ups),
        packing.matrix_bytes(downs),
        packing.scale_bytes(ups),
        packing.scale_bytes(downs),
        sum(4 * len(bias) for bias in biases),
        sum(4 * len(bias) for bias in down_biases),
    ]
    ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
    offsets = (0, *ends[:-1])
    hidden, intermediate = weights.down.shape
    group = spec.stored.group if spec.stored is not None else 0
    has_bias = bool(biases), bool(down_biases)
    layout = Layout(hidden, intermediate, packing.coding, group, has_bias, offsets, ends[-1])
    with uploads.device.loading():
        memory = uploads.device.empty(layout.nbytes, dtype=torch.uint8)
        up, down, up_scales, down_scales, up_bias, down_bias = (
            memory[at : at + size] for at, size in zip(offsets, sizes, strict=True)
        )
        packing.write_matrices(ups, up)
        packing.write_matrices(downs, down)
        packing.write_scales(ups, up_scales)
        packing.write_scales(downs, down_scales)
        for parts, to in ((biases, up_bias), (down_biases, down_bias)):
            if parts:
                uploads.write(to, torch.cat(parts).float().view(torch.uint8))
    return DeviceExpert(memory, layout)


class _Packing:
    """Writes matrices and their scales into sections of a block."""

    def __init__(self, spec: KernelSpec, uploads: Uploads, pause: Pause) -> None:
        self.coding = check_spec(spec)
        self._spec, self._uploads, self._pause = spec, uploads, pause

    def matrix_bytes(self, parts: Sequence[Matrix]) -> int:
        """Memory of matrices, one below the other."""
        return sum(part.shape[0] for part in parts) * self._row_bytes(parts[0].shape[1])

    def scale_bytes(self, parts: Sequence[Matrix]) -> int:
        """Memory of their scales."""
        channels = sum(part.shape[0] for part in parts)
        return _SCALE_BYTES.get(self.coding, 0) * self._groups(parts[0].shape[1]) * channels

    def write_matrices(self, parts: Sequence[Matrix], to: torch.Tensor) -> None:
        """Write matrices one below the other, in pieces of whole rows."""
        row_bytes = self._row_bytes(parts[0].shape[1])
        at = 0
        for part in parts:
            rows = part if isinstance(part, torch.Tensor) else part.codes
            for begin, end in pieces(len(rows), max(1, PIECE_BYTES // row_bytes)):
                self._pause()
                piece = self._coded(rows[begin:end], part.shape[1]).view(torch.uint8).flatten()
                self._uploads.write(to[at : at + len(piece)], piece)
                at += len(piece)

    def write_scales(self, parts: Sequence[Matrix], to: torch.Tensor) -> None:
        """Write the scales as (G, N), N over all parts. Raises CorruptShardError: one is not a number."""
        if self.coding not in _SCALE_BYTES:
            return
        self._pause()
        groups = self._groups(parts[0].shape[1])
        scales = []
        for part in parts:
            assert isinstance(part, QuantizedMatrix)
            scales_NG = part.scales
            is_one = scales_NG.shape[1] == 1
            scales.append(
                scales_NG.expand(-1, groups)
                if is_one
                else functional.pad(scales_NG, (0, groups - scales_NG.shape[1]), value=_E8M0_ONE)
            )
        scales_GN = torch.cat(scales).t().contiguous()
        is_number = scales_GN != _E8M0_NAN if self.coding is Coding.MXFP4 else scales_GN.isfinite()
        if not bool(is_number.all()):
            raise CorruptShardError(f"a scale is NaN or infinite: {DAMAGED}")
        self._uploads.write(to, scales_GN.view(torch.uint8).flatten())

    def _row_bytes(self, inputs: int) -> int:
        return int(padded(inputs) * _CODE_BYTES[self.coding])

    def _groups(self, inputs: int) -> int:
        if self.coding is Coding.MXFP4:
            return padded(inputs) // _MXFP4_GROUP
        group = self._spec.stored.group if self._spec.stored is not None else 0
        return -(-inputs // group) if group else 1

    def _coded(self, rows: torch.Tensor, inputs: int) -> torch.Tensor:
        """Lay rows of numbers or codes out as the device reads them."""
        if self.coding is not Coding.MXFP4:
            rows = rows if self.coding is Coding.FP8 else rows.to(self._spec.dtype)
            return functional.pad(rows, (0, padded(inputs) - inputs)).contiguous()
        codes = torch.stack((rows & 15, rows >> 4), 2).flatten(1)[:, :inputs]
        codes = functional.pad(codes, (0, padded(inputs) - inputs))
        low, high = codes.view(len(codes), -1, 2, INNER // 2).unbind(2)
        return (low | high << 4).flatten(1)


def _some(bias: torch.Tensor | None) -> list[torch.Tensor]:
    return [] if bias is None else [bias]
