"""Matrix products of torch with weights packed once, and where packed weights lie.

x (N, in) times a weight (out, in) -> (N, out).
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch.nn import functional

from eaas.log import get_logger
from expert_server.memory import huge_memory

__all__ = ["Products", "best_products", "ready"]

_log = get_logger(__name__)

# Up to so many rows, MKL is faster than oneDNN in float32.
_FEW_ROWS = 3


class Products(Protocol):
    """Matrix products of one dtype: x (N, in), a weight packed from (out, in) -> (N, out)."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight in this product's layout, in memory of its own.

        Args:
            weight: (out, in), or with `out` in several dimensions; any float dtype and strides.
        """

    def nbytes(self, weight: torch.Tensor) -> int:
        """Memory of a packed weight."""

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """A fresh tensor, x @ weight.T + bias."""


class _Plain:
    """torch's own, on weights as they are."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return _own_copy(weight, self._dtype)

    def nbytes(self, weight: torch.Tensor) -> int:
        return weight.nbytes

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return functional.linear(x, weight, bias)


class _OneDnnPlain(_Plain):
    """oneDNN's, on weights as they are, and torch's own for a few rows."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._op = torch.ops.mkldnn._linear_pointwise.default

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if x.shape[0] <= _FEW_ROWS:
            return functional.linear(x, weight, bias)
        return self._op(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


class _OneDnnPacked:
    """oneDNN's, on weights in its own blocks."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._op = torch.ops.mkldnn._linear_pointwise.default
        self._reorder = torch.ops.mkldnn._reorder_linear_weight.default
        self._nbytes = torch.ops.mkldnn._nbytes.default

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        # Without a hint of how many rows come: with 64 or 512 as the hint the blocks are the same, with
        # 1 they are slower from 128 rows on and no faster below.
        return self._reorder(ready(weight, self._dtype), None)  # type: ignore[no-any-return]

    def nbytes(self, weight: torch.Tensor) -> int:
        # The tensor's own `nbytes` knows nothing of blocks.
        return self._nbytes(weight)  # type: ignore[no-any-return]

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return self._op(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


@cache
def best_products(dtype: torch.dtype) -> Products:
    """The best that works here. The operations are private to torch, and oneDNN has not every dtype
    on every CPU: they are tried out.
    """
    try:
        products = _OneDnnPacked(dtype) if dtype is torch.bfloat16 else _OneDnnPlain(dtype)
        weight = products.pack(torch.ones(16, 16))
        products.nbytes(weight)
        products.multiply(torch.ones(_FEW_ROWS + 1, 16, dtype=dtype), weight, None)
    except (AttributeError, RuntimeError) as error:
        _log.warning("%s: no packed products of oneDNN here (%s), torch's own", dtype, error)
        return _Plain(dtype)
    return products


def ready(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight (..., in) as a contiguous (out, in) in that dtype; copied only where it must be."""
    if weight.dtype is dtype and weight.is_contiguous():
        return weight.flatten(0, -2)
    return _own_copy(weight, dtype)


def _own_copy(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight (..., in) as (out, in) in that dtype, in pages of its own."""
    memory = huge_memory(weight.numel() * dtype.itemsize)
    return memory.view(dtype).view(weight.shape).copy_(weight).flatten(0, -2)
