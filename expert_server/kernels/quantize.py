"""Weight-only quantisation, as an expert server packs experts, and the error that it causes.

int8 has one scale per output channel, int4 one per output channel and group of 128 inputs. Both are
symmetric. N output channels, K inputs, G groups, R rows of activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch.nn import functional

from eaas.checkpoint.formats import USUAL
from eaas.checkpoint.formats.codes import join_halves
from eaas.checkpoint.quantized import INT4, INTEGERS, QuantizedMatrix
from eaas.errors import CheckpointError
from expert_server.kernels.kernel import Quantization
from expert_server.weights.weights import ExpertForm, ExpertWeights

__all__ = [
    "GROUP",
    "QUANTIZED",
    "fake_quantize",
    "quantization_error",
    "quantize",
]

GROUP = INT4.block[1]
QUANTIZED = {Quantization(code.name): USUAL[code.name] for code in INTEGERS.values()}
"""What float weights become."""
# Rows are processed in blocks of fewer weights than this. Then scratch memory stays in the cache, and torch
# uses one thread: threads that synchronise after each small step are slow while the cores compute.
_BLOCK = 1 << 15
# Block of a product that measures the error: few steps, and no second copy of a matrix.
_PRODUCT_BLOCK = 1 << 22
# Activations that measure the error.
_ROWS = 64
# Adding and subtracting 1.5 * 2^23 rounds to the nearest integer; `torch.round` would use threads.
_ROUND = 12582912.0
# A group's largest weight times these, over 8, are the scales tried. On Gaussian weights they bring the
# relative error from 0.118 (largest weight over 7) to 0.098; finer steps gain less than 0.001.
_CLIPS = (1.0, 0.9, 0.8)


def quantize(matrix_NK: torch.Tensor, quantization: Quantization) -> QuantizedMatrix:
    """Quantise a weight matrix to the nearest representable one; deterministic.

    Args:
        matrix_NK: Any float dtype and strides; out by in.
        quantization: INT8 or INT4.

    Raises:
        CheckpointError: A weight is NaN or infinite; no scale can represent it.
    """
    rows, inputs = matrix_NK.shape
    weights, group = QUANTIZED[quantization].format, QUANTIZED[quantization].group or inputs
    codes = torch.empty(rows, -(-inputs * weights.bits // 8), dtype=torch.uint8)
    scale_NG = torch.empty(rows, -(-inputs // group))
    rule = _RULES[quantization]
    for block in _blocks(rows, inputs, _BLOCK):
        codes_NK, scale_NG[block] = rule(matrix_NK[block].float().contiguous())
        # Signed bytes + 128 overflow to the intended unsigned ones.
        unsigned_NK = (codes_NK + weights.zero).view(torch.uint8)
        codes[block] = unsigned_NK if weights.bits == 8 else join_halves(unsigned_NK)
    if not bool(scale_NG.isfinite().all()):
        raise CheckpointError(
            f"weights are NaN or infinite, which {quantization} cannot hold: "
            "serve this checkpoint without quantisation"
        )
    return QuantizedMatrix(weights, inputs, group, codes, scale_NG)


def fake_quantize(
    weights: ExpertWeights, form: ExpertForm, quantization: Quantization
) -> ExpertWeights:
    """Quantise and dequantise an expert, for the reference kernel and trials; biases are not quantised.

    Raises:
        CheckpointError: A weight is NaN or infinite.
    """

    up, down = _matrices(weights, form)
    quantized = replace(weights, up=quantize(up, quantization), down=quantize(down, quantization))
    return quantized.dequantize(form, up.dtype)


@torch.inference_mode()
def quantization_error(
    weights: ExpertWeights, form: ExpertForm, quantization: Quantization
) -> float:
    """Relative error of an expert's output, ||y_q - y|| / ||y||, on 64 rows of standard normal activations.

    The server's start message shows it. y uses the checkpoint's weights, y_q the quantised ones. Both are
    computed in float32, so that no other rounding counts.

    Raises:
        CheckpointError: A weight is NaN or infinite.
    """
    up, down = _matrices(weights, form)
    x_RH = torch.randn(_ROWS, up.shape[1], generator=torch.Generator().manual_seed(0))

    def output(kept: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        hidden_RI = form.activate(_linear(x_RH, up, weights.up_bias, kept))
        return _linear(hidden_RI, down, weights.down_bias, kept)

    exact_RH = output(torch.Tensor.float)
    left_RH = output(lambda matrix_NK: quantize(matrix_NK, quantization).dequantize())
    tiny = torch.finfo(torch.float32).tiny  # an expert of zeros has no error
    return float((left_RH - exact_RH).norm() / exact_RH.norm().clamp(min=tiny))


def _matrices(weights: ExpertWeights, form: ExpertForm) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrices up and down as (out, in), which must not be quantised yet."""
    plain = weights.plain(form)
    assert isinstance(plain.up, torch.Tensor)
    assert isinstance(plain.down, torch.Tensor)
    return plain.up, plain.down


def _linear(
    x_RK: torch.Tensor,
    matrix_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    kept: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Multiply activations by `kept(matrix)`, one block of the matrix's rows after another."""
    rows, inputs = matrix_NK.shape
    blocks = _blocks(rows, inputs, _PRODUCT_BLOCK)
    product_RN = torch.cat([functional.linear(x_RK, kept(matrix_NK[at])) for at in blocks], dim=1)
    return product_RN if bias_N is None else product_RN + bias_N


def _blocks(rows: int, inputs: int, weights: int) -> Iterator[slice]:
    """Split rows into slices of fewer than `weights` weights, so that scratch stays small."""
    step = max(1, (weights - 1) // inputs)
    return (slice(start, start + step) for start in range(0, rows, step))


def _int8(w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to int8: codes (N, K) and scales (N, 1).

    With 255 levels, clipping the largest weight gains nothing.
    """
    scale_N1 = w_NK.abs().amax(1, keepdim=True) / 127
    codes_NK = _rounded(w_NK / _nonzero(scale_N1)).clamp_(-127, 127)
    return codes_NK.to(torch.int8), scale_N1


def _int4(w_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise groups to int4: codes (N, K), scales (N, G); the best of a few clips, then least squares.

    The largest weight of a group maps to -8, the end with one more code, by the sign of the scale. For codes
    c of weights u the best scale is (u.c) / (c.c). The larger (u.c)^2 / (c.c), the smaller the error.
    """
    rows, inputs = w_NK.shape
    u = functional.pad(w_NK, (0, -inputs % GROUP)).view(rows, -1, GROUP)
    top, bottom = u.amax(2, keepdim=True), u.amin(2, keepdim=True)
    largest = torch.where(top > -bottom, top, bottom)
    unit = largest / -8
    u = u / _nonzero(unit)  # in [-8, 8]: no square overflows, whatever the weights' size
    clip = best = torch.zeros_like(unit)
    for candidate in _CLIPS:
        uc, cc = _products(u, _int4_codes(u / candidate))
        gain = uc.square() / cc
        clip = torch.where(gain > best, candidate, clip)
        best = torch.maximum(gain, best)
    uc, cc = _products(u, _int4_codes(u / _nonzero(clip)))
    codes = _int4_codes(u / _nonzero(uc / cc))
    uc, cc = _products(u, codes)
    scale_NG = (unit * (uc / cc)).squeeze(2)
    return codes.view(rows, -1)[:, :inputs].to(torch.int8), scale_NG


def _int4_codes(scaled: torch.Tensor) -> torch.Tensor:
    return _rounded(scaled).clamp_(-8, 7)


def _rounded(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest integers, ties to even, in place; for magnitudes below 2^22."""
    return values.add_(_ROUND).sub_(_ROUND)


def _products(u: torch.Tensor, codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """u.c and c.c of each group; c.c is 1 if all codes are 0 (then u.c is 0)."""
    cc = codes.square().sum(2, keepdim=True).clamp_(min=1)
    return (u * codes).sum(2, keepdim=True), cc


def _nonzero(scale: torch.Tensor) -> torch.Tensor:
    """Replace scales of 0 by 1, a divisor that maps weights of 0 to codes of 0."""
    return torch.where(scale == 0, 1, scale)


_RULES = {Quantization.INT8: _int8, Quantization.INT4: _int4}
