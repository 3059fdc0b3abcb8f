"""Random quantised matrices, to try a kernel and to measure it.

N output channels, K inputs, G groups.
"""

from __future__ import annotations

import math

import torch

from eaas.checkpoint.quantized import QuantizedMatrix, WeightFormat
from expert_server.kernels.kernel import StoredFormat

__all__ = ["random_matrix"]

# A prime, so that rows and columns differ although the codes repeat.
_CODES = 1_000_003


def random_matrix(
    stored: StoredFormat, outputs: int, inputs: int, rng: torch.Generator
) -> QuantizedMatrix:
    """Draw a matrix (N, K) that keeps activations near 1.

    All codes but NaN are as frequent. Scales vary by a factor of 2 and have 8 bits, as those of checkpoints
    have at most 11; zero points vary over their whole range.
    """
    groups = -(-inputs // stored.group) if stored.group else 1
    codes = _codes(stored.format, outputs, inputs, rng)
    zeros = None
    if stored.has_zeros:
        # int4 has one more zero point than codes (GPTQ stores them less 1).
        most = min(1 << stored.format.bits, 255)
        zeros = torch.randint(0, most + 1, (outputs, groups), dtype=torch.uint8, generator=rng)
    size = 1 / (_size(stored) * math.sqrt(inputs))
    if stored.format.has_exponents:
        exponent = 127 + round(math.log2(size))
        scales = torch.randint(
            exponent - 1, exponent + 2, (outputs, groups), dtype=torch.uint8, generator=rng
        )
    else:
        scales = torch.empty(outputs, groups).uniform_(2**-0.5, 2**0.5, generator=rng).mul_(size)
        scales = scales.bfloat16().float()
    order = torch.randperm(inputs, generator=rng) if stored.has_order else None
    return QuantizedMatrix(
        stored.format, inputs, stored.group or inputs, codes, scales, zeros, order
    )


def _codes(weights: WeightFormat, outputs: int, inputs: int, rng: torch.Generator) -> torch.Tensor:
    """Draw codes. A large matrix repeats them, because drawing all takes long."""
    shape = outputs, -(-inputs * weights.bits // 8)
    count = math.prod(shape)
    codes = torch.randint(0, 256, (min(_CODES, count),), dtype=torch.uint8, generator=rng)
    for code in weights.nans:
        codes[codes == code] = 0
    return codes.repeat(-(-count // max(1, len(codes))))[:count].view(shape)


def _size(stored: StoredFormat) -> float:
    """Root mean square of a code's value, without its scale."""
    weights = stored.format
    values = weights.decode(torch.arange(1 << weights.bits, dtype=torch.uint8)) - weights.zero
    size = float(values[values.isfinite()].square().mean().sqrt())
    # A code less a zero point: the difference of two even distributions.
    return size * math.sqrt(2) if stored.has_zeros else size
