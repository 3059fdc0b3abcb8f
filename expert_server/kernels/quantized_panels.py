"""Pack quantised weights for the compiled kernel (`native/native.h` draws the layout).

A panel is 16 output channels, cut into segments of inputs. Each segment ends with its channels' scales, so
that a product reads memory strictly forward. N output channels, K inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from eaas.checkpoint.pieces import PIECE_BYTES, Pause, at_once, pieces
from expert_server.kernels.kernel import Quantization
from expert_server.kernels.quantize import GROUP, QuantizedMatrix, quantize

__all__ = ["pack_quantized", "panel_bytes", "rows_of_piece"]

_PANEL, _LINE_BYTES = 16, 64


@dataclass(frozen=True)
class _Layout:
    """Layout of one quantisation.

    Attributes:
        line: Inputs in a line of 64 bytes.
        segment: Inputs between two lines of scales.
        unit: The inputs are padded to a multiple of it.
        zero: Added to each code, so that the stored value is unsigned.
    """

    line: int
    segment: int
    unit: int
    zero: int


_LAYOUTS = {
    Quantization.INT8: _Layout(line=4, segment=1024, unit=64, zero=128),
    Quantization.INT4: _Layout(line=8, segment=GROUP, unit=GROUP, zero=8),
}


def panel_bytes(inputs: int, quantization: Quantization) -> int:
    """Memory of a panel, in bytes."""
    layout = _LAYOUTS[quantization]
    padded = _padded(inputs, layout.unit)
    return (padded // layout.line + -(-padded // layout.segment)) * _LINE_BYTES


def rows_of_piece(row_bytes: int) -> int:
    """Rows packed between two pauses: whole panels of about one piece of weights."""
    return max(1, PIECE_BYTES // (_PANEL * row_bytes)) * _PANEL


def pack_quantized(
    parts: Sequence[torch.Tensor],
    quantization: Quantization,
    out: torch.Tensor,
    pause: Pause = at_once,
) -> None:
    """Quantise matrices of one shape (N, K) into alternating panels.

    Args:
        parts: Gate and up, or a single matrix.
        quantization: INT8 or INT4.
        out: uint8, `panel_bytes` for each part and 16 channels.
        pause: Called before each piece.

    Raises:
        CheckpointError: A weight is NaN or infinite.
    """
    channels, inputs = parts[0].shape
    lines = panel_bytes(inputs, quantization) // _LINE_BYTES
    panels = out.view(torch.int32).view(-1, len(parts), lines, _PANEL)
    some = rows_of_piece(inputs * parts[0].itemsize)
    for place, part in enumerate(parts):
        for begin, end in pieces(channels, some):
            pause()
            piece = panels[begin // _PANEL : -(-end // _PANEL), place]
            _fill(piece, quantize(part[begin:end], quantization), _LAYOUTS[quantization])


def _fill(panels: torch.Tensor, matrix: QuantizedMatrix, layout: _Layout) -> None:
    """Write one matrix into its panels, int32 (N / 16, lines, 16)."""
    rows, inputs = matrix.codes.shape
    padded, missing_rows = _padded(inputs, layout.unit), -rows % _PANEL
    codes = functional.pad(matrix.codes, (0, padded - inputs, 0, missing_rows))
    words = _words(codes + layout.zero, layout)
    segments = -(-padded // layout.segment)
    scale = functional.pad(matrix.scale, (0, 0, 0, missing_rows)).view(torch.int32)
    scale = scale.expand(-1, segments)  # int8: one scale for all segments
    # Whole segments, then the rest.
    whole = padded // layout.segment
    lines = layout.segment // layout.line
    end = whole * (lines + 1)
    _fill_segments(panels[:, :end], words[:, : whole * lines], scale[:, :whole])
    _fill_segments(panels[:, end:], words[:, whole * lines :], scale[:, whole:])


def _fill_segments(panels: torch.Tensor, words: torch.Tensor, scale: torch.Tensor) -> None:
    """Write segments of equal length, each with its line of scales at the end.

    Words (N, lines), scale (N, segments).
    """
    segments = scale.shape[1]
    if segments == 0:
        return
    split = torch.unflatten(panels, 1, (segments, -1))
    split[:, :, :-1] = words.view(len(panels), _PANEL, segments, -1).permute(0, 2, 3, 1)
    split[:, :, -1] = scale.reshape(len(panels), _PANEL, segments).transpose(1, 2)


def _words(stored: torch.Tensor, layout: _Layout) -> torch.Tensor:
    """Pack each channel's codes, four bytes per int32: (N, K) -> (N, K / line).

    int8 codes + 128 overflow to the intended unsigned bytes.
    """
    if layout.line == 8:
        low, high = stored.view(len(stored), -1, 2, 4).unbind(2)
        stored = low | high << 4
    return stored.contiguous().view(len(stored), -1).view(torch.int32)


def _padded(value: int, unit: int) -> int:
    return -(-value // unit) * unit
