"""Packs experts into panels for the compiled kernel as they load; `native/native.h` draws the panels.

A word has 4 bytes: a float32, two bfloat16, four codes of 8 bits, eight of 4 bits, or a scale. N output
channels, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from eaas.checkpoint.pieces import PIECE_BYTES, Pause, at_once, pieces
from eaas.checkpoint.quantized import DAMAGED, QuantizedMatrix, WeightFormat
from eaas.errors import CorruptShardError
from eaas.memory import huge_memory
from expert_server.kernels import _native
from expert_server.kernels.activation import Activation
from expert_server.kernels.kernel import KernelSpec, Quantization, UnsupportedError
from expert_server.kernels.matrices import Matrix, check_format, rows_of, split_gate
from expert_server.kernels.quantize import QUANTIZED, quantize
from expert_server.weights.weights import ExpertWeights

__all__ = ["PackedExpert", "is_decoded", "pack_expert", "panel_format"]

_PANEL, _WORD_BYTES = 16, 4
_FORMATS = _native.formats()
_FLOATS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, eq=False)
class PackedExpert:
    """One expert packed into panels, in one block of memory.

    Attributes:
        memory: The block, uint8.
        addresses: Addresses of up, down, up_bias, down_bias, up_order; 0 if absent.
        size: (H, I).
    """

    memory: torch.Tensor
    addresses: tuple[int, ...]
    size: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Memory of the packed expert, in bytes, padding and scales included."""
        return self.memory.nbytes


def is_decoded(weights: WeightFormat) -> bool:
    """Whether the compiled kernel computes from these codes; else they become floats on loading."""
    return any(code == weights.name for code, *_ in _FORMATS)


def panel_format(spec: KernelSpec) -> int:
    """Choose the format of an expert's panels (`Format` in native.h).

    Raises:
        UnsupportedError: There is none for the checkpoint's groups or zero points, or for the dtype.
    """
    if spec.dtype not in _FLOATS:
        raise UnsupportedError(f"{spec.dtype} weights: this kernel supports float32 and bfloat16")
    stored = spec.stored or QUANTIZED.get(spec.quantization)
    if stored is None or not is_decoded(stored.format):
        return [code for code, *_ in _FORMATS].index(_FLOATS[spec.dtype])
    units = []
    for number, (code, unit, may_have_zeros, are_short) in enumerate(_FORMATS):
        if code != stored.format.name or stored.has_zeros > may_have_zeros:
            continue
        if are_short and not stored.has_short_scales:
            continue
        if not stored.group or (unit and stored.group % unit == 0):
            return number
        units.append(unit)
    if not units:
        raise UnsupportedError(f"{stored}: this kernel has no zero points of {stored.format}")
    raise UnsupportedError(
        f"{stored}: this kernel supports groups of multiples of {min(filter(None, units), default=0)}, "
        "and a scale per channel"
    )


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
        spec: Number formats of the panels and of the weights.
        pause: Called before each piece.
        allocate: Makes zeros, uint8, of so many bytes.

    Raises:
        CheckpointError: A weight to be quantised or a scale is NaN or infinite, or a matrix has another
            format than `spec.stored`.
    """
    for matrix in (weights.up, weights.down):
        check_format(matrix, spec.stored)
    gate_and_up = split_gate(weights.up, activation)
    biases = split_gate(weights.up_bias, activation)
    up_order, down_order = _order(weights.up, torch.int32), _order(weights.down, torch.int64)
    if down_order is not None:
        # The first product makes its outputs in the order in which the second one takes them.
        gate_and_up = [rows_of(part, down_order) for part in gate_and_up]
        biases = [part[down_order] for part in biases]
    packing = _Packing(panel_format(spec), spec)
    down_biases = [] if weights.down_bias is None else [weights.down_bias]
    sizes = [
        packing.nbytes(gate_and_up),
        packing.nbytes([weights.down]),
        _bias_bytes(biases),
        _bias_bytes(down_biases),
        0 if up_order is None else up_order.nbytes,
    ]
    memory = allocate(sum(sizes))
    up, down, up_bias, down_bias, order = blocks = torch.split(memory, sizes)
    packing.pack(gate_and_up, up, pause)
    packing.pack([weights.down], down, pause)
    _pack_biases(biases, up_bias)
    _pack_biases(down_biases, down_bias)
    if up_order is not None:
        order.view(torch.int32).copy_(up_order)
    hidden, intermediate = weights.down.shape
    addresses = tuple(block.data_ptr() if len(block) else 0 for block in blocks)
    return PackedExpert(memory, addresses, (hidden, intermediate))


@dataclass(frozen=True)
class _Packing:
    """Packs matrices into panels of a format, and quantises them before if the spec says so."""

    format: int
    spec: KernelSpec

    def nbytes(self, parts: Sequence[Matrix]) -> int:
        """Memory of the panels of matrices of one shape."""
        channels, inputs = parts[0].shape
        size: int = _native.panel_bytes(self.format, inputs)
        return len(parts) * -(-channels // _PANEL) * size

    def pack(self, parts: Sequence[Matrix], out: torch.Tensor, pause: Pause) -> None:
        """Pack matrices of one shape (N, K) into alternating panels: [N / 16][part][words][16].

        The padding is not written: `out` is zeros.
        """
        for place, part in enumerate(parts):
            channels, inputs = part.shape
            panel_bytes = _native.panel_bytes(self.format, inputs)
            # Whole panels of about one piece of weights.
            some = max(1, PIECE_BYTES // (_PANEL * self._row_bytes(part))) * _PANEL
            for begin, end in pieces(channels, some):
                pause()
                panel = begin // _PANEL * len(parts) + place
                self._pack_rows(
                    rows_of(part, slice(begin, end)),
                    out.data_ptr() + panel * panel_bytes,
                    len(parts) * panel_bytes // _WORD_BYTES,
                )

    def _row_bytes(self, part: Matrix) -> int:
        if isinstance(part, QuantizedMatrix):
            return part.codes.shape[1]
        return part.shape[1] * max(part.itemsize, self.spec.dtype.itemsize)

    def _pack_rows(self, part: Matrix, out: int, panel_words: int) -> None:
        if isinstance(part, torch.Tensor) and self.spec.quantization is not Quantization.NONE:
            part = quantize(part, self.spec.quantization)
        if isinstance(part, QuantizedMatrix) and not is_decoded(part.format):
            part.check("an expert")
            # The order of its inputs is that of the codes.
            part = replace(part, order=None).dequantize()
        if isinstance(part, torch.Tensor):
            _pack_floats(part.to(self.spec.dtype), out, panel_words)
            return
        codes, scales = _contiguous(part.codes), _contiguous(part.scales)
        zeros = None if part.zeros is None else _contiguous(part.zeros)
        is_finite = _native.pack_quantized(
            self.format,
            part.inputs,
            part.group if scales.shape[1] > 1 else part.inputs,
            (codes.data_ptr(), codes.stride(0)),
            (scales.data_ptr(), scales.stride(0)),
            (0, 0, part.format.zero) if zeros is None else (zeros.data_ptr(), zeros.stride(0), 0),
            len(codes),
            out,
            panel_words,
        )
        if not is_finite:
            raise CorruptShardError(f"a scale is NaN or infinite: {DAMAGED}")


def _pack_floats(rows: torch.Tensor, out: int, panel_words: int) -> None:
    """Pack rows (N, K) of numbers into panels; rows may be strided, a row's values are contiguous."""
    word = _WORD_BYTES // rows.itemsize
    if rows.shape[1] % word:
        rows = functional.pad(rows, (0, 1))
    if rows.stride(1) != 1 or rows.stride(0) % word:
        rows = rows.contiguous()
    _native.pack(
        rows.data_ptr(),
        rows.stride(0) // word,
        len(rows),
        rows.shape[1] // word,
        out,
        panel_words,
    )


def _bias_bytes(parts: Sequence[torch.Tensor]) -> int:
    return sum(-(-len(part) // _PANEL) * _PANEL * _WORD_BYTES for part in parts)


def _pack_biases(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Lay biases of one size out like the outputs of their panels: [N / 16][part][16] float32."""
    panels = out.view(torch.float32).view(-1, max(1, len(parts)), _PANEL)
    for place, part in enumerate(parts):
        panels[:, place] = functional.pad(part.float(), (0, -len(part) % _PANEL)).view(-1, _PANEL)


def _order(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor | None:
    if isinstance(matrix, torch.Tensor) or matrix.order is None:
        return None
    return matrix.order.to(dtype)


def _contiguous(rows: torch.Tensor) -> torch.Tensor:
    """Rows whose values are contiguous; they may be strided."""
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
