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
from eaas.checkpoint.quantized import DAMAGED, FP8, MXFP4, QuantizedMatrix
from eaas.errors import CorruptShardError
from expert_server.kernels.activation import Activation
from expert_server.kernels.gpu.device import Uploads
from expert_server.kernels.gpu.tiles import INNER, Coding
from expert_server.kernels.kernel import KernelSpec, Quantization, UnsupportedError
from expert_server.kernels.matrices import Matrix, check_format, split_gate
from expert_server.weights.weights import ExpertWeights

__all__ = ["STORED", "DeviceExpert", "Layout", "check_spec", "pack_expert", "padded"]

# Sections of a block begin at multiples of this, in bytes.
_ALIGNMENT = 256
STORED = {FP8: Coding.FP8, MXFP4: Coding.MXFP4}
_CODE_BYTES = {Coding.BFLOAT16: 2, Coding.FLOAT32: 4, Coding.FP8: 1, Coding.MXFP4: 0.5}
_E8M0_ONE, _E8M0_NAN = 127, 255


@dataclass(frozen=True)
class Layout:
    """Where the parts of an expert lie in its block; equal for all experts of a layer.

    Attributes:
        hidden, intermediate: H, I.
        coding: How the matrices are coded.
        group: Inputs per scale of FP8; 0: one scale per channel.
        has_bias: Whether both products have a bias.
        up, down: Bytes from the block's begin to the matrix, its scales and its bias.
    """

    hidden: int
    intermediate: int
    coding: Coding
    group: int
    has_bias: tuple[bool, ...]
    up: tuple[int, ...]
    down: tuple[int, ...]


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
    coding = STORED.get(stored.format)
    if coding is None or stored.has_zeros or stored.has_order:
        raise UnsupportedError(f"{stored}: of stored weights this kernel supports fp8 and mxfp4")
    if spec.dtype is not torch.bfloat16:
        raise UnsupportedError(f"{stored}: this kernel supports them in bfloat16 models only")
    unit = stored.format.block[1]
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
        DeviceFullError: The device has no memory for the block.
        DeviceLostError: The device has failed.
    """
    for matrix in (weights.up, weights.down):
        check_format(matrix, spec.stored)
    coding, group = check_spec(spec), spec.stored.group if spec.stored is not None else 0
    products: list[list[Matrix]] = [split_gate(weights.up, activation), [weights.down]]
    biases = [split_gate(weights.up_bias, activation), _some(weights.down_bias)]
    others = [*(_scales(parts, coding, group, pause) for parts in products), *map(_joined, biases)]
    sizes = [sum(part.shape[0] * _row_bytes(part, coding) for part in parts) for parts in products]
    sizes += map(len, others)
    *begins, nbytes = accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)
    hidden, intermediate = weights.down.shape
    has_bias, offsets = tuple(map(bool, biases)), tuple(begins)
    layout = Layout(hidden, intermediate, coding, group, has_bias, offsets[::2], offsets[1::2])
    with uploads.load():
        memory = uploads.device.empty(nbytes, dtype=torch.uint8)
        sections = [memory[at : at + size] for at, size in zip(begins, sizes, strict=True)]
        for parts, to in zip(products, sections, strict=False):
            at = 0
            for part in parts:
                rows = part if isinstance(part, torch.Tensor) else part.codes
                most = max(1, PIECE_BYTES // _row_bytes(part, coding))
                for begin, end in pieces(len(rows), most):
                    pause()
                    piece = _coded(rows[begin:end], part.shape[1], coding, spec.dtype)
                    uploads.write(to[at : at + len(piece)], piece)
                    at += len(piece)
        for section, to in zip(others, sections[2:], strict=True):
            uploads.write(to, section)
    return DeviceExpert(memory, layout)


def _row_bytes(matrix: Matrix, coding: Coding) -> int:
    return int(padded(matrix.shape[1]) * _CODE_BYTES[coding])


def _coded(rows: torch.Tensor, inputs: int, coding: Coding, dtype: torch.dtype) -> torch.Tensor:
    """Lay rows of numbers or codes out as the device reads them: uint8 (bytes)."""
    padding = 0, padded(inputs) - inputs
    if coding is Coding.MXFP4:
        codes = torch.stack((rows & 15, rows >> 4), 2).flatten(1)[:, :inputs]
        codes = functional.pad(codes, padding).view(len(rows), -1, 2, INNER // 2)
        rows = codes[:, :, 0] | codes[:, :, 1] << 4
    else:
        rows = functional.pad(rows if coding is Coding.FP8 else rows.to(dtype), padding)
    return rows.contiguous().flatten().view(torch.uint8)


def _scales(parts: Sequence[Matrix], coding: Coding, group: int, pause: Pause) -> torch.Tensor:
    """Return the scales of matrices, (G, N) with N over all parts, as bytes; floats have none.

    Raises:
        CorruptShardError: A scale is NaN or infinite.
    """
    if coding in (Coding.BFLOAT16, Coding.FLOAT32):
        return torch.empty(0, dtype=torch.uint8)
    pause()
    groups = -(-padded(parts[0].shape[1]) // group) if group else 1
    scales = []
    for part in parts:
        assert isinstance(part, QuantizedMatrix)
        found = part.scales.shape[1]
        scales.append(
            part.scales.expand(-1, groups)
            if found == 1
            else functional.pad(part.scales, (0, groups - found), value=_E8M0_ONE)
        )
    scales_GN = torch.cat(scales).t().contiguous()
    is_number = scales_GN != _E8M0_NAN if coding is Coding.MXFP4 else scales_GN.isfinite()
    if not bool(is_number.all()):
        raise CorruptShardError(f"a scale is NaN or infinite: {DAMAGED}")
    return scales_GN.flatten().view(torch.uint8)


def _joined(biases: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return biases, float32, as bytes."""
    return torch.cat((torch.empty(0), *biases)).float().view(torch.uint8)


def _some(bias: torch.Tensor | None) -> list[torch.Tensor]:
    return [] if bias is None else [bias]
