"""torch's matrix products on weights packed once.

x (N, in) times a weight (out, in) -> (N, out).
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
from torch.nn import functional

from eaas.log import get_logger
from expert_server.weights.memory import huge_memory

__all__ = ["Products", "best_products", "ready"]

_log = get_logger(__name__)

# Up to this many rows, MKL is faster than oneDNN in float32.
_FEW_ROWS = 3


class Products(Protocol):
    """Matrix products of one dtype: x (N, in), a weight packed from (out, in) -> (N, out)."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Pack a weight into new memory.

        Args:
            weight: (out, in), or with `out` in several dimensions; any float dtype and strides.
        """

    def nbytes(self, weight: torch.Tensor) -> int:
        """Memory of a packed weight."""

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x @ weight.T + bias, in a new tensor."""


class _Plain:
    """torch's products on unpacked weights."""

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
    """oneDNN's products on unpacked weights, and torch's for few rows."""

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
    """oneDNN's products on weights in its blocked layout."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._op = torch.ops.mkldnn._linear_pointwise.default
        self._reorder = torch.ops.mkldnn._reorder_linear_weight.default
        self._nbytes = torch.ops.mkldnn._nbytes.default

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        # No hint of the number of rows: with 64 or 512 the blocks are the same; with 1 they are slower from
        # 128 rows on and no faster below.
        return self._reorder(ready(weight, self._dtype), None)  # type: ignore[no-any-return]

    def nbytes(self, weight: torch.Tensor) -> int:
        # The tensor's own `nbytes` ignores the blocks' padding.
        return self._nbytes(weight)  # type: ignore[no-any-return]

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return self._op(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


@cache
def best_products(dtype: torch.dtype) -> Products:
    """The best products that work here.

    They are tried out: the operations are private to torch, and oneDNN supports not every dtype on every CPU.
    """
    try:
        products = _OneDnnPacked(dtype) if dtype is torch.bfloat16 else _OneDnnPlain(dtype)
        weight = products.pack(torch.ones(16, 16))
        products.nbytes(weight)
        products.multiply(torch.ones(_FEW_ROWS + 1, 16, dtype=dtype), weight, None)
    except (AttributeError, RuntimeError) as error:
        _log.warning("%s: oneDNN's products do not work here (%s): using torch's", dtype, error)
        return _Plain(dtype)
    return products


def ready(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight (..., in) as a contiguous (out, in) of that dtype; copied only if needed."""
    if weight.dtype is dtype and weight.is_contiguous():
        return weight.flatten(0, -2)
    return _own_copy(weight, dtype)


def _own_copy(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copy a weight (..., in) as (out, in) of that dtype into separate pages."""
    memory = huge_memory(weight.numel() * dtype.itemsize)
    return memory.view(dtype).view(weight.shape).copy_(weight).flatten(0, -2)
