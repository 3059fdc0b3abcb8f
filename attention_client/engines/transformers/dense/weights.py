"""Products with dense weights in bfloat16, on processors for which they are sooner here than in torch.

torch multiplies bfloat16 with oneDNN where the processor has AVX-512; elsewhere it has a plain loop, a tenth
as fast as float32. oneDNN reads the weights for a few rows at half of the speed that AMX tiles allow, and its
threads would spin against the servers'. Weights stay as they are stored: modules see parameters, and call
F.linear as ever.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from attention_client.engines.transformers.dense._dense import has_tiles, multiplies, multiply
from attention_client.engines.transformers.paged._paged import pool

__all__ = ["linear", "multiplies_here", "shared_pool", "use_own_products"]

shared_pool = functools.cache(pool)
"""The pool of so many threads that a process's products and attention share: two pools' threads would spin
against each other."""


@functools.cache
def multiplies_here() -> bool:
    """Whether this processor's products in bfloat16 are sooner here than in torch."""
    return bool(multiplies) and bool(has_tiles or not torch.ops.mkldnn._is_mkldnn_bf16_supported())


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, threads: object
) -> torch.Tensor:
    """Compute F.linear: (.., I), (O, I), (O) -> (.., O). See `_dense.multiply`; `threads` is its pool."""
    out = x.new_empty(*x.shape[:-1], len(weight))
    if multiply(x, weight, bias, out, threads):
        return out
    x = x.contiguous()
    if multiply(x, weight, bias, out, threads):
        return out
    return F.linear(x, weight, bias)


class _Weight(nn.Parameter):
    """A weight whose `F.linear` is `linear`, unless torch needs its own, for gradients and tracing."""

    threads: object = None

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear and not kwargs and _is_ours(*args):
                x, weight, *bias = args
                return linear(x, weight, bias[0] if bias else None, weight.threads)
            return func(*args, **kwargs or {})


def _is_ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    if type(x) is not torch.Tensor or type(weight) is not _Weight or weight.threads is None:
        return False
    if torch.is_grad_enabled() and any(
        part is not None and part.requires_grad for part in (x, weight, bias)
    ):
        return False
    return x.dtype is torch.bfloat16 and not torch.compiler.is_compiling()


def use_own_products(model: nn.Module, threads: int) -> None:
    """Make a model compute its products in bfloat16 here, if that is sooner on this processor."""
    if not multiplies_here():
        return
    made: dict[int, _Weight] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.dtype is not torch.bfloat16 or parameter.dim() != 2:
                continue
            # A tied weight stays one.
            weight = made.get(id(parameter))
            if weight is None:
                weight = _Weight(parameter.data, parameter.requires_grad)
                weight.threads = shared_pool(threads)
                made[id(parameter)] = weight
            module._parameters[name] = weight
