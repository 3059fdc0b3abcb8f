"""Activations of experts with a gate, as models have them."""

from __future__ import annotations

import torch
from torch.nn import functional

__all__ = ["ClampedSwiglu", "swiglu"]


class ClampedSwiglu:
    """GPT-OSS's: interleaved, clamped, shifted."""

    alpha, limit = 1.702, 7.0

    def apply(self, product: torch.Tensor) -> torch.Tensor:
        gate, up = product[..., ::2], product[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (up + 1)


def swiglu(product: torch.Tensor) -> torch.Tensor:
    gate, up = product.chunk(2, dim=-1)
    return functional.silu(gate) * up
