"""Construct a transformers model without weights, and without a change that other threads see.

While transformers' own loaders construct a model, they change torch's default dtype, classes and methods for
the whole process. A load in another thread then gets weights of the wrong dtype, or none.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from copy import deepcopy
from types import MethodType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from eaas.checkpoint.lean_import import without_compiler

__all__ = ["construct", "own_ties"]

_HIDDEN_S = 10.0
_FACTORIES = frozenset(
    (
        *(torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.eye),
        *(torch.tensor, torch.arange, torch.linspace),
    )
)


def _tie_weights() -> Any:
    """Return transformers' method, which is hidden while another thread constructs a model.

    Raises ImportError: it stays hidden, because two loads of other threads overlapped.
    """
    until_s = time.monotonic() + _HIDDEN_S
    # transformers has no lock to wait for.
    while (method := PreTrainedModel.tie_weights).__name__ != "tie_weights":
        if time.monotonic() > until_s:
            raise ImportError(
                "transformers' PreTrainedModel.tie_weights is replaced by another thread's from_pretrained: "
                "import attention_client before threads load models"
            )
        time.sleep(0.01)
    return method


_TIE_WEIGHTS = _tie_weights()


class _FloatsAre(TorchFunctionMode):
    """In this thread, new tensors of floats without a stated dtype have this one.

    Args:
        dtype: In place of torch's default dtype, which belongs to the process.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        made = func(*args, **given)
        if func in _FACTORIES and given.get("dtype") is None and made.is_floating_point():
            return made.to(self._dtype)
        return made


def construct(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """Construct a model on the meta device.

    Args:
        model_class: A class of transformers.
        config: Its config, which stays as it is; the model gets a copy.
        dtype: Dtype of the weights, where the model's code does not state another.

    Raises:
        Exception: Whatever the model's code raises for this config.
    """
    config = deepcopy(config)
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype
    with without_compiler(), torch.device("meta"), _FloatsAre(dtype):
        model = model_class(config)
    with own_ties(model):
        model.tie_weights(recompute_mapping=False)
    return model


@contextlib.contextmanager
def own_ties(model: Any) -> Iterator[None]:
    """Let a model tie its weights although another thread's `from_pretrained` keeps all models from it."""
    if type(model).tie_weights is not PreTrainedModel.tie_weights:
        yield
        return
    model.tie_weights = MethodType(_TIE_WEIGHTS, model)
    try:
        yield
    finally:
        del model.tie_weights
