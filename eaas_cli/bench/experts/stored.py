"""Weights as quantised checkpoints store them, made from random ones, for `eaas bench experts`.

N output channels, K inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from eaas.checkpoint.formats import StoredFormat
from eaas.checkpoint.quantized import QuantizedMatrix, WeightFormat
from eaas_cli.bench.experts.source import Source
from expert_server.kernels.kernel import ExpertKernel
from expert_server.weights.weights import ExpertWeights

__all__ = ["STORED", "load_experts", "store"]

STORED = {
    "fp8": StoredFormat(WeightFormat.FP8, 128),
    "mxfp4": StoredFormat(WeightFormat.MXFP4, 32),
    "int4-g32": StoredFormat(WeightFormat.INT4, 32, has_short_scales=True),
}
_LARGEST_E4M3 = 448.0
# Middles between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 of e2m1: a number's place among them is its code.
_E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_TINY = 1e-30

# Weights (N, G, group) -> codes (N, G, group), and scales (N, G) or their exponents.
_Rule = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def store(weights: ExpertWeights, stored: StoredFormat) -> ExpertWeights:
    """Convert an expert of the plain layout to a format of STORED, by the largest weight of each group."""
    assert isinstance(weights.up, torch.Tensor)
    assert isinstance(weights.down, torch.Tensor)
    return ExpertWeights(_matrix(weights.up, stored), _matrix(weights.down, stored))


def load_experts(kernel: ExpertKernel, source: Source, dtype: str) -> None:
    """Load a source's experts into layer 0 of a kernel, in a format of STORED if `dtype` is one."""
    for expert, weights in enumerate(source.experts()):
        kernel.load(0, expert, store(weights, STORED[dtype]) if dtype in STORED else weights)


def _matrix(matrix_NK: torch.Tensor, stored: StoredFormat) -> QuantizedMatrix:
    outputs, inputs = matrix_NK.shape
    padded = functional.pad(matrix_NK.float(), (0, -inputs % stored.group))
    codes, scales_NG = _RULES[stored.format](padded.view(outputs, -1, stored.group))
    codes = codes.view(outputs, -1)
    if stored.format.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    codes = codes[:, : -(-inputs * stored.format.bits // 8)]
    return QuantizedMatrix(stored.format, inputs, stored.group, codes.contiguous(), scales_NG)


def _fp8(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = _largest(w) / _LARGEST_E4M3
    return (w / scales).to(torch.float8_e4m3fn).view(torch.uint8), scales.squeeze(2)


def _mxfp4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # The largest magnitude gets the largest power of two, 4, as the specification of MX formats says.
    exponents = _largest(w).log2().floor() - 2
    scaled = w / exponents.exp2()
    codes = torch.bucketize(scaled.abs(), torch.tensor(_E2M1_MIDDLES)).to(torch.uint8)
    return codes | (scaled < 0).to(torch.uint8) << 3, (exponents + 127).to(torch.uint8).squeeze(2)


def _int4(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = (_largest(w) / 7).bfloat16().float()
    return ((w / scales).round() + 8).clamp(0, 15).to(torch.uint8), scales.squeeze(2)


def _largest(w: torch.Tensor) -> torch.Tensor:
    return w.abs().amax(2, keepdim=True).clamp(min=_TINY)


_RULES: dict[WeightFormat, _Rule] = {
    WeightFormat.FP8: _fp8,
    WeightFormat.MXFP4: _mxfp4,
    WeightFormat.INT4: _int4,
}
