"""Hugging Face checkpoints: files are validated without torch, and tensors are opened lazily."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eaas.checkpoint.files import precheck
    from eaas.checkpoint.model import Checkpoint, ExpertTensor
    from eaas.checkpoint.quiet import quiet_transformers

__all__ = ["Checkpoint", "ExpertTensor", "precheck", "quiet_transformers"]


def __getattr__(name: str) -> Any:
    # On first use: a command that parses the name of a checkpoint reads none.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = {"precheck": "files", "quiet_transformers": "quiet"}
    return getattr(import_module(f"{__name__}.{modules.get(name, 'model')}"), name)
