"""Imports transformers without what no process of a cluster runs: the compiler, distributed tensors, images.

transformers and torch import them for decorators and for parts that are not used here; that takes longer than
all the rest of transformers.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__ = ["import_transformers", "without_compiler", "without_torch"]

_MODELS = "transformers.models"
# transformers imports them if they are installed, and text models do without. A missing name only costs time.
_OPTIONAL = frozenset(
    (
        *("PIL", "cv2", "librosa", "pandas", "scipy", "sklearn", "timm", "torchao", "torchaudio"),
        *("torchcodec", "torchvision"),
    )
)
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
# The one module of it that models run, which needs no other.
_ALONE = f"{_COMPILER}._trace_wrapped_higher_order_op"


def without_torch() -> None:
    """Let transformers find no torch, whose import takes seconds and 200 MB, in a process that needs none."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    # Else transformers warns about it.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def import_transformers() -> None:
    """Import transformers for models; only in a process of our own, since others may want all of it.

    transformers finds no `torch.distributed` and none of the packages that text models do without.
    Does nothing if it is imported already.
    """
    global _is_lean
    if "transformers" in sys.modules:
        return
    import torch

    _is_lean = True
    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    # Asked whether a package is installed; imports do not ask it.
    importlib.util.find_spec = _find_needed
    try:
        with without_compiler():
            import transformers

            # Its `__init__` reads all files of all models again, for names that nobody imports from there.
            transformers.models = _stand_in(_MODELS)
            for module in ("modeling_utils", "modeling_layers", "generation.utils"):
                importlib.import_module(f"transformers.{module}")
    finally:
        torch.distributed.is_available = is_available
        importlib.util.find_spec = find_spec


def _find_needed(name: str, package: str | None = None) -> ModuleSpec | None:
    return None if name in _OPTIONAL else find_spec(name, package)


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """After `import_transformers`, keep decorators in a `with` block from importing torch's compiler.

    They have an effect where a graph is compiled: in another process. What asks for more gets the compiler.
    """
    if not _is_lean or _COMPILER in sys.modules:
        yield
        return
    compiler = _stand_in(_COMPILER)
    vars(compiler).update(_ASKED)
    finder = _RealParts(compiler)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        # Who needs it from now on gets the real one.
        _remove(compiler)


class _RealParts(MetaPathFinder, Loader):
    """Before a module of a package is imported whose stand-in this is, puts the real package in its place."""

    def __init__(self, stand_in: ModuleType) -> None:
        self._stand_in = stand_in
        self._imported: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec of the module if the real package has imported it meanwhile."""
        name = self._stand_in.__name__
        if not fullname.startswith(f"{name}.") or fullname == _ALONE:
            return None
        if not _remove(self._stand_in):
            return None
        importlib.import_module(name)
        if fullname not in sys.modules:
            return None
        self._imported[fullname] = sys.modules[fullname].__spec__
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module as it is."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Leave it so."""
        module.__spec__ = self._imported.pop(module.__name__)


def _stand_in(name: str) -> ModuleType:
    """Register a package whose modules can be imported, and whose `__init__` runs once a name is missing."""
    spec = find_spec(name)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)

    def find_in_real(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        _remove(module)
        return getattr(importlib.import_module(name), attribute)

    module.__getattr__ = find_in_real  # type: ignore[method-assign]
    sys.modules[name] = module
    return module


def _remove(stand_in: ModuleType) -> bool:
    """Make room for the real module; return whether the stand-in was still there."""
    name = stand_in.__name__
    if sys.modules.get(name) is not stand_in:
        return False
    del sys.modules[name]
    parent, _, child = name.rpartition(".")
    vars(sys.modules[parent]).pop(child, None)
    return True
