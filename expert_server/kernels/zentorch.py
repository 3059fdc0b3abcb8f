"""`packed` with the products of zentorch (AMD's library for EPYC), an optional extra.

It uses zentorch's matrix product on weights packed by the caller, not its fused MoE operation. That one keeps
packed copies by the weights' addresses, which doubles their memory, and it neither frees nor renews a copy
when another expert takes the address.

zentorch does not use AMX: on CPUs that have it, `packed` is faster.
"""

from __future__ import annotations

import importlib

import torch

from expert_server.kernels.kernel import UnsupportedError
from expert_server.kernels.packed import PackedKernel
from expert_server.kernels.products import Products, ready

__all__ = ["ZentorchKernel"]


class ZentorchKernel(PackedKernel):
    """See the module.

    Raises:
        UnsupportedError: zentorch is missing or does not load, the CPU has no AVX-512, the dtype is neither
            bfloat16 nor float32, or quantisation is configured.
    """

    name = "zentorch"

    def _products_of(self, dtype: torch.dtype) -> Products:
        # On other CPUs it ends the process with an illegal instruction.
        if torch.backends.cpu.get_cpu_capability() != "AVX512":
            raise UnsupportedError("it needs a CPU with AVX-512")
        try:
            importlib.import_module("zentorch")
            return _Zentorch(dtype)
        except (ImportError, OSError, AttributeError) as error:
            raise UnsupportedError(
                f"zentorch is missing or does not load ({error}): "
                "pip install 'expert-as-a-service[zentorch]'"
            ) from error


class _Zentorch:
    """Products on weights in AOCL's blocked layout."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._pack = torch.ops.zentorch.zentorch_weight_prepack_for_linear.default
        self._multiply = torch.ops.zentorch.zentorch_linear_unary.default

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return self._pack(ready(weight, self._dtype))  # type: ignore[no-any-return]

    def nbytes(self, weight: torch.Tensor) -> int:
        return weight.untyped_storage().nbytes()

    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return self._multiply(x, weight, bias, is_weight_prepacked=True)  # type: ignore[no-any-return]
