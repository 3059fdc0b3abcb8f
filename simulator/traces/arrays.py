"""Reads plain arrays as traces: .npy, other programs' .npz, .safetensors, and the tensors of a .pt.

Such an array does not say what its numbers are:

    ids      (tokens, layers, top-k)           the experts of each token, as vLLM (`routed_experts` of an
                                               output), SGLang and others return them
    counts   (iterations, layers, experts)     tokens by expert

Both are whole numbers in three dimensions. An array is taken for counts only if it cannot be ids; otherwise
the reader asks. Ids alone do not tell how many experts a layer has.

`read_trace` turns what NumPy, zipfile and zlib raise for a wrong or truncated file into a TraceError.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from balancer.policies.token_ids import MOST_IDS, MOST_TOP_K, count_token_ids
from eaas.errors import TraceError
from simulator.traces.trace import Trace, check_form, checked_counts, refuse_places

__all__ = [
    "MOST_EXPERTS",
    "Array",
    "Arrays",
    "Meaning",
    "read_archive",
    "read_npy",
    "read_safetensors",
    "trace_of",
]

Array = npt.NDArray[Any]
# The arrays of a file by name, each to be read when it is called; also that may raise TraceError.
Arrays = Mapping[str, Callable[[], Array]]

# Far above any model's number, so that one wrong number cannot allocate all memory.
MOST_EXPERTS = 1 << 16
_TOKENS = 1024
_NAMES_SHOWN = 8
# Types of safetensors that NumPy has, too.
_SAFETENSORS = {
    *(f"{kind}{bits}" for kind in "IU" for bits in (8, 16, 32, 64)),
    *("F16", "F32", "F64"),
}


@dataclass(frozen=True)
class Meaning:
    """What the user says about a plain array.

    Attributes:
        kind: What the numbers are; None: not said.
        experts: Experts of a layer (E): needed for ids, a check for counts.
        tokens: Tokens of an iteration, for ids; None: 1,024.
        name: The array to take from a file that holds several.
    """

    kind: Literal["ids", "counts"] | None = None
    experts: int | None = None
    tokens: int | None = None
    name: str | None = None


def trace_of(arrays: Arrays, path: Path, meaning: Meaning) -> Trace:
    """Make a trace of the one array that is meant.

    Raises:
        TraceError: The file holds several arrays, or one that may be ids or counts, and `meaning` does not
            say which; ids without a number of experts; or values that are not what they are said to be. The
            message names the place.
    """
    name = _choice(arrays, path, meaning.name)
    values, place = arrays[name](), f"{path}, array {name}" if name else str(path)
    check_form(values, place)
    notes: dict[str, Any] = {"source": path.name, **({"array": name} if name else {})}
    if (meaning.kind or _certain_kind(values, place)) == "ids":
        tokens = _TOKENS if meaning.tokens is None else meaning.tokens
        counts = _counted(values, place, meaning.experts, tokens)
        return Trace(checked_counts(counts, place), {**notes, "tokens": tokens})
    if meaning.tokens is not None:
        raise TraceError(
            f"{place}: counts (iterations, layers, experts) have their iterations: leave --tokens out"
        )
    if meaning.experts not in (None, values.shape[2]):
        raise TraceError(
            f"{place}: the shape {values.shape} has counts of {values.shape[2]} experts, not of "
            f"{meaning.experts}: give --experts {values.shape[2]}, or --kind ids"
        )
    return Trace(checked_counts(values, place), notes)


def _choice(arrays: Mapping[str, Any], path: Path, name: str | None) -> str:
    if name is None and len(arrays) == 1:
        return next(iter(arrays))
    if name is None or name not in arrays:
        names = [repr(given) for given in arrays if given]
        shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
        what = "has several arrays" if name is None else f"has no array {name!r}"
        if not names:
            raise TraceError(f"{path} {what if name else 'has no array'}: leave --array out")
        raise TraceError(f"{path} {what}: choose one of {shown} with --array")
    return name


def _certain_kind(values_ALC: Array, place: str) -> Literal["counts"]:
    """Return "counts" for values that cannot be ids. Raises TraceError for values that may be either."""
    first, layers, columns = values_ALC.shape
    if columns > MOST_TOP_K or values_ALC.max() >= MOST_IDS:
        return "counts"
    raise TraceError(
        f"{place}: the shape {values_ALC.shape} can be counts, {first} iterations x {layers} layers x "
        f"{columns} experts, or ids, {first} tokens x {layers} layers x top-{columns}: say which with "
        "`eaas trace convert`, --kind counts or --kind ids"
    )


def _counted(values_TLK: Array, place: str, experts: int | None, tokens: int) -> Array:
    if experts is None:
        raise TraceError(
            f"{place}: ids do not tell how many experts a layer has (the highest is {values_TLK.max()}): "
            "give --experts"
        )
    if not values_TLK.shape[2] <= experts <= MOST_EXPERTS:
        raise TraceError(
            f"{place}: the shape {values_TLK.shape} has {values_TLK.shape[2]} experts for each token: give "
            f"--experts of at least as many, and at most {MOST_EXPERTS}"
        )
    if values_TLK.dtype.kind == "f":
        known = np.abs(values_TLK) < np.float64(MOST_EXPERTS)
        whole = known & (values_TLK == np.floor(values_TLK))
        refuse_places(values_TLK, ~whole, "no id of an expert: give whole numbers", place, "id")
        values_TLK = values_TLK.astype(np.int64)
    try:
        return count_token_ids(values_TLK, experts, tokens)
    except ValueError as error:
        raise TraceError(f"{place}: {error}") from error
    except MemoryError as error:
        iterations, layers = -(-len(values_TLK) // tokens), values_TLK.shape[1]
        raise TraceError(
            f"{place}: {iterations} iterations x {layers} layers x {experts} experts do not fit in memory: "
            "give more --tokens"
        ) from error


def read_npy(path: Path) -> Arrays:
    """Return the only array of a .npy, named ""."""
    return {"": partial(np.lib.format.open_memmap, path, mode="r")}


def read_archive(path: Path) -> Arrays:
    """Return the arrays of a .npz by name."""

    def read(name: str) -> Array:
        with np.load(path, allow_pickle=False) as archive:
            values: Array = archive[name]
            return values

    if not zipfile.is_zipfile(path):
        raise ValueError("no NumPy archive")
    with np.load(path, allow_pickle=False) as archive:
        return {name: partial(read, name) for name in archive.files}


def read_safetensors(path: Path) -> Arrays:
    """Return the arrays of a .safetensors by name."""
    from safetensors import SafetensorError, safe_open

    def read(name: str) -> Array:
        with safe_open(path, framework="numpy") as file:
            dtype = file.get_slice(name).get_dtype()
            if dtype not in _SAFETENSORS:
                raise TraceError(f"{path}, array {name}: holds {dtype}, give whole numbers")
            values: Array = file.get_tensor(name)
            return values

    try:
        with safe_open(path, framework="numpy") as file:
            return {name: partial(read, name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(error) from error
