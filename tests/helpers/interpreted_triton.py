"""Kernel `triton` in Triton's interpreter, on CPU tensors; tests skip where Triton is not installed."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from expert_server.kernels.gpu.kernel import TritonKernel

__all__ = ["interpreted_kernel", "needs_triton", "round_rows_alike"]

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="Triton is not installed (extra `triton`)"
)


def round_rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a row of a product round the same wherever it stands in a tile, as it does on a GPU.

    The interpreter multiplies by NumPy, whose library rounds some rows otherwise on some machines.
    """

    def multiply(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
        return np.einsum("ik,kj->ij", a, b, dtype=dtype)

    monkeypatch.setattr(np, "matmul", multiply)


@cache
def interpreted_kernel() -> type[TritonKernel]:
    """Import the kernel. Whether its code is interpreted is decided then, for the whole process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        from expert_server.kernels.gpu import products
        from expert_server.kernels.gpu.kernel import TritonKernel
    assert products.INTERPRETED
    return TritonKernel
