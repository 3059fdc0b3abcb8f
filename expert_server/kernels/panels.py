"""Packs experts into panels for the compiled kernel as they load; `native/native.h` draws the panels.

A word has 4 bytes: a float32, two bfloat16, four int8, eight int4, or a scale. N output channels, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from eaas.checkpoint.pieces import PIECE_BYTES, Pause, at_once, pieces
from eaas.memory import huge_memory
from expert_server.kernels import _native
from expert_server.kernels.activation import Activation
from expert_server.kernels.kernel import KernelSpec, Quantization
from expert_server.kernels.quantize import GROUP, quantize
from expert_server.weights.weights import ExpertWeights

__all__ = ["PackedExpert", "pack_expert"]

_PANEL, _WORD_BYTES = 16, 4


@dataclass(frozen=True, eq=False)
class PackedExpert:
    """One expert packed into panels, in one block of memory.

    Attributes:
        memory: The block, uint8.
        addresses: Addresses of up, down, up_bias, down_bias; 0 if absent.
        size: (H, I).
    """

    memory: torch.Tensor
    addresses: tuple[int, int, int, int]
    size: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Memory of the packed expert, in bytes, padding and scales included."""
        return self.memory.nbytes


@dataclass(frozen=True)
class _Layout:
    """How the inputs of one output channel lie in a row of words.

    Attributes:
        dtype: Dtype of values that are not quantised.
        unit: The inputs are padded to a multiple of it.
        quantization: Format of the values.
        word: Inputs in a word.
        segment: Inputs between two scales, if there are scales.
        zero: Added to each code, so that the stored value is unsigned.
    """

    dtype: torch.dtype
    unit: int
    quantization: Quantization = Quantization.NONE
    word: int = 1
    segment: int = 0
    zero: int = 0

    @classmethod
    def of(cls, spec: KernelSpec) -> _Layout:
        """Choose the layout of an expert's matrices, by the kernel's dtype and quantisation."""
        match spec.quantization:
            case Quantization.INT8:
                return cls(spec.dtype, 64, spec.quantization, 4, 1024, 128)
            case Quantization.INT4:
                return cls(spec.dtype, GROUP, spec.quantization, 8, GROUP, 8)
            case _:
                return cls(spec.dtype, 32, word=_WORD_BYTES // spec.dtype.itemsize)

    def words(self, inputs: int) -> int:
        """Number of words in the row of one output channel, scales included."""
        padded = _padded(inputs, self.unit)
        return padded // self.word + (-(-padded // self.segment) if self.segment else 0)

    def rows(self, matrix_NK: torch.Tensor) -> torch.Tensor:
        """Convert a matrix to rows of whole words. Rows may be strided; a row's values are contiguous."""
        if self.quantization is not Quantization.NONE:
            return self._quantized(matrix_NK)
        rows = matrix_NK.to(self.dtype)
        if rows.shape[1] % self.word:
            rows = functional.pad(rows, (0, 1))
        is_ready = rows.stride(1) == 1 and rows.stride(0) % self.word == 0
        return rows if is_ready else rows.contiguous()

    def _quantized(self, matrix_NK: torch.Tensor) -> torch.Tensor:
        """Quantise a matrix to int32 (N, words): the words of each segment, followed by its scale."""
        matrix = quantize(matrix_NK, self.quantization)
        codes = functional.pad(matrix.codes, (0, -matrix.codes.shape[1] % self.unit))
        codes = codes + self.zero  # int8 codes + 128 overflow to the intended unsigned bytes.
        if self.word == 8:
            low, high = codes.view(len(codes), -1, 2, 4).unbind(2)
            codes = (low | high << 4).flatten(1)
        segments = torch.split(codes.view(torch.int32), self.segment // self.word, dim=1)
        # int8 has one scale for all segments.
        scale = matrix.scale.view(torch.int32).expand(-1, len(segments))
        scales = torch.split(scale, 1, dim=1)
        return torch.cat([part for both in zip(segments, scales, strict=True) for part in both], 1)


# A bias is a matrix of one input.
_BIAS = _Layout(torch.float32, unit=1)


def pack_expert(
    weights: ExpertWeights,
    activation: Activation,
    spec: KernelSpec,
    pause: Pause = at_once,
    allocate: Callable[[int], torch.Tensor] = huge_memory,
) -> PackedExpert:
    """Pack an expert of the plain (out, in) layout into panels.

    Args:
        weights: up (2I, H) or (I, H), down (H, I).
        activation: Defines how gate and up lie in `up`.
        spec: dtype (float32 or bfloat16) and quantization of the panels.
        pause: Called before each piece.
        allocate: Makes zeros, uint8, of so many bytes.

    Raises:
        CheckpointError: A weight to be quantised is NaN or infinite.
    """
    layout = _Layout.of(spec)
    up_bias, down_bias = (
        None if bias is None else bias[:, None] for bias in (weights.up_bias, weights.down_bias)
    )
    matrices = (
        (_gate_and_up(weights.up, activation), layout),
        ((weights.down,), layout),
        (() if up_bias is None else _gate_and_up(up_bias, activation), _BIAS),
        (() if down_bias is None else (down_bias,), _BIAS),
    )
    sizes = [
        len(parts) * _padded(len(parts[0]), _PANEL) * layout.words(parts[0].shape[1]) * _WORD_BYTES
        if parts
        else 0
        for parts, layout in matrices
    ]
    memory = allocate(sum(sizes))
    blocks = torch.split(memory, sizes)
    for (parts, layout), block in zip(matrices, blocks, strict=True):
        _pack(parts, layout, block, pause if layout is not _BIAS else at_once)
    up, down, up_bias_at, down_bias_at = (block.data_ptr() if len(block) else 0 for block in blocks)
    hidden, intermediate = weights.down.shape
    return PackedExpert(memory, (up, down, up_bias_at, down_bias_at), (hidden, intermediate))


def _gate_and_up(up: torch.Tensor, activation: Activation) -> tuple[torch.Tensor, ...]:
    """Split an up matrix or bias: (2I, ...) -> gate (I, ...), up (I, ...); without a gate only up."""
    if not activation.has_gate:
        return (up,)
    if activation.is_interleaved:
        return up[::2], up[1::2]
    gate, up = up.chunk(2)
    return gate, up


def _pack(parts: Sequence[torch.Tensor], layout: _Layout, out: torch.Tensor, pause: Pause) -> None:
    """Pack matrices of one shape (N, K) into alternating panels: [N / 16][part][words][16].

    The padding is not written: `out` is zeros.
    """
    for place, part in enumerate(parts):
        channels, inputs = part.shape
        panel_words = layout.words(inputs) * _PANEL
        # Whole panels of about one piece of weights.
        row_bytes = inputs * max(part.itemsize, layout.dtype.itemsize)
        some = max(1, PIECE_BYTES // (_PANEL * row_bytes)) * _PANEL
        for begin, end in pieces(channels, some):
            pause()
            rows = layout.rows(part[begin:end])
            values = _WORD_BYTES // rows.itemsize
            panel = begin // _PANEL * len(parts) + place
            _native.pack(
                rows.data_ptr(),
                rows.stride(0) // values,
                end - begin,
                rows.shape[1] // values,
                out.data_ptr() + _WORD_BYTES * panel * panel_words,
                len(parts) * panel_words,
            )


def _padded(value: int, unit: int) -> int:
    return -(-value // unit) * unit
