"""Imports transformers without what no process of a cluster runs: compiler, distributed tensors, scipy.

transformers and torch import them for decorators and for parts that are not used here; that takes longer than
all the rest of transformers.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

__all__ = ["import_transformers", "without_compiler"]

_MODELS = "transformers.models"
_is_lean = False


def _leave_undecorated(function: Any = None, *_: Any, **__: Any) -> Any:
    return function or (lambda decorated: decorated)


def _ignore(_tensor: Any) -> None:
    pass


_COMPILER = "torch._dynamo"
# What uncompiled code asks it for.
_ASKED = {
    "disable": _leave_undecorated,
    "allow_in_graph": _leave_undecorated,
    "assume_constant_result": _leave_undecorated,
    "mark_static_address": _ignore,
}


def import_transformers() -> None:
    """Import transformers for models; only in a process of our own, since others may want all of it.

    transformers finds no `torch.distributed` and no scipy.
    Does nothing if it is imported already.
    """
    global _is_lean
    if "transformers" in sys.modules:
        return
    import torch

    _is_lean = True
    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    hides_scipy = "scipy" not in sys.modules
    if hides_scipy:
        sys.modules["scipy"] = None  # type: ignore[assignment]
    try:
        with without_compiler():
            import transformers

            # Its `__init__` reads all files of all models again, for names that nobody imports from there.
            transformers.models = _stand_in(_MODELS)
            for module in ("modeling_utils", "modeling_layers", "generation.utils"):
                importlib.import_module(f"transformers.{module}")
    finally:
        torch.distributed.is_available = is_available
        if hides_scipy:
            del sys.modules["scipy"]


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """After `import_transformers`, keep a `with` block from importing torch's compiler.

    Only decorators ask for it, which have an effect where a graph is compiled: in another process.
    """
    if not _is_lean or _COMPILER in sys.modules:
        yield
        return
    compiler = _stand_in(_COMPILER)
    vars(compiler).update(_ASKED)
    try:
        yield
    finally:
        # Who needs it from now on gets the real one.
        if sys.modules.get(_COMPILER) is compiler:
            _remove(_COMPILER)


def _stand_in(name: str) -> ModuleType:
    """Register a package whose modules can be imported, and whose `__init__` runs once a name is missing."""
    spec = find_spec(name)
    assert spec is not None
    module = module_from_spec(spec)

    def find_in_real(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        if sys.modules.get(name) is module:
            _remove(name)
        return getattr(importlib.import_module(name), attribute)

    module.__getattr__ = find_in_real  # type: ignore[method-assign]
    sys.modules[name] = module
    return module


def _remove(name: str) -> None:
    del sys.modules[name]
    parent, _, child = name.rpartition(".")
    if parent:
        vars(sys.modules[parent]).pop(child, None)
