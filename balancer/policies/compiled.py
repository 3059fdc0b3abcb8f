"""Bindings of the policies' compiled C loops (native/ and fractional/), through ctypes; they release the GIL.

Each function declares here the types and shapes of its arrays, with a letter for each size. A call checks
them, so that C never reads or writes beyond an array, and appends the sizes. Outputs are filled in place. The
C files document the functions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "allocate",
    "anti_affinity",
    "interleave",
    "match",
    "place",
    "plan_fractional",
    "plan_spares",
    "refine",
    "replay",
    "replicate",
    "separate",
    "sparse_new",
    "sparse_of_compact",
    "sparse_of_holds",
    "spread",
]

_LIBRARY = ctypes.CDLL(str(Path(__file__).with_name("_native.abi3.so")))
# native/export.h
_RESULTS = {
    # 1: MemoryError
    2: "load_LE, servers: too many experts or servers to plan for",
    3: "an expert, server or number of replicas is out of range",
}
_NUMBERS = {"bool": ctypes.c_bool, "int": ctypes.c_int64, "float": ctypes.c_double}
_DTYPES = {name: np.dtype(name) for name in ("bool", "int32", "int64", "float32", "float64")}


def _function(name: str, arguments: str, sizes: str) -> Callable[..., None]:
    """Bind a C function of the library, at import; the calls check their arrays.

    It raises ValueError for an array of another type or size, or one that is not contiguous.

    Args:
        name: Its name in C.
        arguments: Arguments of the call and in C, separated by blanks: a number's type, or an array as
            `type:shape` with a letter for each dimension. `?` at the end: may be None.
        sizes: Letters of the sizes that C gets after the arguments.
    """
    found = getattr(_LIBRARY, name)
    types: list[Any] = []
    arrays = []
    for at, argument in enumerate(arguments.split()):
        kind, is_array, shape = argument.partition(":")
        types.append(ctypes.c_void_p if is_array else _NUMBERS[kind])
        if is_array:
            arrays.append((at, _DTYPES[kind], shape.rstrip("?"), shape.endswith("?")))
    found.argtypes = [*types, *([ctypes.c_ssize_t] * len(sizes))]
    found.restype = ctypes.c_int

    def call(*given: Any) -> None:
        passed, size_of = list(given), dict[str, int]()
        for at, dtype, letters, optional in arrays:
            array = given[at]
            if array is None and optional:
                continue
            shape = array.shape
            fits = array.dtype == dtype and array.flags.c_contiguous and len(shape) == len(letters)
            if not fits or any(
                [size_of.setdefault(x, n) != n for x, n in zip(letters, shape, strict=True)]
            ):
                raise ValueError(
                    f"{name}, argument {at}: {array.dtype} {shape}, wanted {dtype} {letters}, "
                    f"contiguous, with {size_of}"
                )
            passed[at] = array.ctypes.data
        # The size of an array that is not given is 0.
        result = found(*passed, *[size_of.get(x, 0) for x in sizes])
        if result == 1:
            raise MemoryError
        if result:
            raise ValueError(_RESULTS[result])

    return call


# W window, L layers, E experts, S servers, P replicas, X further replicas, N plans, G groupings, B
# batches or scenarios, K choices, T iterations (or means of a few).
replicate = _function("replicate_layers", "float64:LE int64:L int bool int64:LE int64:LX", "LEX")
place = _function(
    "place_layers", "float64:LE int64:NLE int64:NLS float64:S bool int32:NLP", "NLESP"
)
separate = _function("separate_layers", "float64:LP int64:LP int int int32:LP", "LP")
refine = _function("refine_layers", "float64:LE int64:LE float64:S int int32:LP", "LESP")
# Sparse layouts (balancer/policies/sparse.py): their rows' begins X, their replicas N.
sparse_of_compact = _function(
    "sparse_of_compact", "int64:LE int32:LP int64:X int32:N float64:N", "LEPXN"
)
sparse_of_holds = _function(
    "sparse_of_holds", "bool:LSE float64:LSE? int64:X int32:N float64:N", "LSEXN"
)
sparse_new = _function("sparse_new", "int64:X int32:N int64:X int32:M int64:X", "XNM")
spread = _function("spread_layers", "int64:LE int64:LS int32:LP", "LSEP")
match = _function("match_layers", "int64:LE int32:LP bool:LSE int64:LS bool int64:LS", "LSEP")
replay = _function("replay_layers", "float32:BLE int64:NLE int32:NLP int float64:NL", "NBLEP")
anti_affinity = _function(
    "anti_affinity_layers",
    "float64:LE int64:LS float64:S int32:GS int bool bool bool:LSE? bool:LSE? bool:LSE float64:LSE? "
    "bool:L",
    "LSEG",
)
allocate = _function("allocate_layers", "float64:LK int64:K int64:L int int64:L", "LK")
interleave = _function("interleave_layers", "int64:L int64:LS int64:LS", "LS")
plan_fractional = _function(
    "plan_fractional",
    "float64:BLE? float32:LTE? int64:LS float64:S int64:X? int32:M? float64:M? int32:S? int float float "
    "int64:X int32:N float64:N",
    "BLTSEXMN",
)
plan_spares = _function(
    "plan_spares", "float64:BE int64:X int32:N float64:S bool:S float int32:S", "BESXN"
)
