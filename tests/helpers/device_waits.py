"""Lists the operators of torch that would make the host wait for a GPU, while a test runs on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Waits"]

# Operators whose result's shape or value the host needs: with a GPU, they wait for it.
WAITING = {
    "aten::_local_scalar_dense",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::repeat_interleave",
}


class Waits(TorchDispatchMode):
    """Lists the operators that would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        self.operators += 1
        # A mask as an index is turned into numbers.
        is_mask = name.startswith("aten::index") and any(
            each is not None and each.dtype is torch.bool for each in args[1]
        )
        if name in WAITING or is_mask:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
