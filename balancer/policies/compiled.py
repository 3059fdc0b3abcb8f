"""The compiled loops (native/ and fractional/), through ctypes: they release the GIL.

Arrays are C-contiguous, of these types and of the shapes that the C file of a function states; callers vouch
for shapes and for indices in range. Outputs are filled in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.ctypeslib import ndpointer

__all__ = [
    "interleave",
    "match",
    "pack",
    "place",
    "plan_fractional",
    "refine",
    "replay",
    "replicate",
    "spread",
]

_LIBRARY = ctypes.CDLL(str(Path(__file__).with_name("_native.abi3.so")))
_NO_MEMORY, _TOO_MANY = 1, 2  # native/export.h

_N = ctypes.c_ssize_t
_INT64 = ctypes.c_int64
_F32, _F64 = (ndpointer(kind, flags="C_CONTIGUOUS") for kind in (np.float32, np.float64))
_I32, _I64 = (ndpointer(kind, flags="C_CONTIGUOUS") for kind in (np.int32, np.int64))
_BOOL = ndpointer(np.bool_, flags="C_CONTIGUOUS")


def _or_none(pointer: Any) -> Any:
    """The type of an argument that may be None (NULL in C)."""

    class Optional(pointer):  # type: ignore[misc]
        @classmethod
        def from_param(cls, given: Any) -> Any:
            return None if given is None else pointer.from_param(given)

    return Optional


def _function(name: str, *types: Any) -> Callable[..., None]:
    found = getattr(_LIBRARY, name)
    found.argtypes, found.restype = types, ctypes.c_int

    def call(*arguments: Any) -> None:
        result = found(*arguments)
        if result == _NO_MEMORY:
            raise MemoryError
        if result == _TOO_MANY:
            raise ValueError("load_LE, servers: too many experts or servers to plan for")

    return call


replicate = _function("replicate_layers", _F64, _I64, _N, _N, _INT64, ctypes.c_int, _I64, _I64, _N)
pack = _function("pack_layers", _F64, _or_none(_I64), _N, _N, _N, _N, _I64, _I64)
place = _function("place_layers", _F64, _I64, _I64, _F64, _N, _N, _N, _N, _N, _I32)
refine = _function("refine_layers", _F64, _I64, _F64, _N, _N, _N, _N, _INT64, _I32)
spread = _function("spread_layers", _I64, _I64, _N, _N, _N, _BOOL, _F64)
match = _function("match_layers", _I64, _I32, _BOOL, _I64, _N, _N, _N, _N, _I64)
replay = _function("replay_layers", _F32, _I64, _I32, _N, _N, _N, _N, _N, _N, _F64)
interleave = _function("interleave_layers", _I64, _I64, _N, _N, _I64)
plan_fractional = _function(
    "plan_fractional",
    *(_F64, _N, _N, _N, _N, _I64, _F64, _or_none(_BOOL), _or_none(_F64)),
    *(ctypes.c_double, _BOOL, _F64),
)
