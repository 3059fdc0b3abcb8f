"""Finds the matrices that a checkpoint stores quantised, and quantised tensors that no format reads.

Other packages add formats by entry points (docs/models.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import entry_points
from typing import Any

from eaas.checkpoint.formats.awq import awq_matrices
from eaas.checkpoint.formats.compressed_tensors import compressed_matrices
from eaas.checkpoint.formats.fp8 import fp8_matrices, modelopt_matrices
from eaas.checkpoint.formats.gptq import gptq_matrices
from eaas.checkpoint.formats.mxfp4 import mxfp4_matrices
from eaas.checkpoint.formats.section import SIDE_FILES, Section, side_section, stated_section
from eaas.checkpoint.formats.stored import Reader, StoredMatrix, Tensors, Unreadable
from eaas.checkpoint.header import TensorEntry
from eaas.errors import UnsupportedModelError
from eaas.log import one_line

__all__ = ["BUILT_IN", "GROUP", "find_matrices"]

GROUP = "eaas.formats"
"""Entry points of this group are formats of other packages: a `quant_method`, and a `Reader`."""

BUILT_IN: dict[str, Reader] = {
    "fp8": fp8_matrices,
    "mxfp4": mxfp4_matrices,
    "compressed-tensors": compressed_matrices,
    "gptq": gptq_matrices,
    "awq": awq_matrices,
    "modelopt": modelopt_matrices,
}
_REMEDY = "use another version of the model, or dequantise it with transformers and save it"
_NARROW_FLOATS = ("F8_", "F6_", "F4")
_BYTES = ("I8", "U8")
_INTEGERS = (*_BYTES, "I16", "U16", "I32", "U32", "I64", "U64")
# Of a tensor that scales a weight: no model of transformers has a parameter X beside a parameter X_scale.
_SCALES = ("_scale", "_scale_inv", "_scales")
_WEIGHTS = ("weight", "qweight", "weight_packed")
# What SmoothQuant and AWQ divide a module's input by, if no layer before it does.
_SMOOTHING = "pre_quant_scale"
# Tables that some models have as bytes.
_TABLE = re.compile(r"bias|mask")


def find_matrices(
    place: Callable[[str], str],
    read: Callable[[str], dict[str, Any]],
    config: Mapping[str, Any],
    tensors: Tensors,
) -> tuple[dict[str, StoredMatrix], Mapping[str, Any]]:
    """Find the quantised matrices of a checkpoint.

    Args:
        place: Names a file of the checkpoint in messages.
        read: Reads a file with a JSON object; empty: there is none of that name.
        config: Content of config.json.
        tensors: Name -> header entry of every tensor.

    Returns:
        Name of the weight -> matrix; and config.json with the section of another file, if that tells of them.

    Raises:
        UnsupportedModelError: The format, or the variant of it, is not supported, or quantised tensors are
            left over.
    """
    section = stated_section(place, config)
    if section is None and _unread(tensors, ()) is not None:
        # Otherwise such a file is a leftover beside weights that are not quantised.
        section = side_section(read)
    matrices = {} if section is None else _matrices(place(section.file), section, tensors)
    parts = {part for matrix in matrices.values() for part in matrix.parts.values()}
    left = _unread(tensors, parts)
    if left is not None:
        raise _not_described(place, section, left, tensors[left])
    if section is not None and section.file in SIDE_FILES:
        config = {**config, "quantization_config": dict(section.fields)}
    return matrices, config


def _matrices(file: str, section: Section, tensors: Tensors) -> dict[str, StoredMatrix]:
    method = section.method
    reader = _reader(file, method) if isinstance(method, str) else None
    if reader is None:
        known = ", ".join(BUILT_IN)
        raise UnsupportedModelError(
            f"{file}: its quantisation names no quant_method (supported: {known}): {_REMEDY}"
            if method is None
            else f"{file}: quantised with {method!r}, which is not supported (supported: {known}): {_REMEDY}"
        )
    try:
        return {matrix.name: matrix for matrix in reader(section.fields, tensors)}
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        why = f"{error}"
        if not isinstance(error, Unreadable):
            # A field of a kind that no tool writes.
            why = f"{method} has another form here ({type(error).__name__}: {one_line(error)})"
        raise UnsupportedModelError(f"{file}: {why}: {_REMEDY}") from error


def _reader(file: str, method: str) -> Reader | None:
    """Find what reads a `quant_method`; None: nothing does."""
    found = BUILT_IN.get(method)
    for entry in () if found else entry_points(group=GROUP, name=method):
        try:
            found = entry.load()
        except (ImportError, AttributeError) as error:
            why = f"{entry.value} cannot be loaded: {one_line(error)}"
            raise UnsupportedModelError(f"{file}: quantised with {method!r}: {why}") from error
    return found


def _unread(tensors: Tensors, parts: Collection[str]) -> str | None:
    """Return the first tensor of a quantised weight that is no part of a matrix."""
    for name, entry in tensors.items():
        if name in parts:
            continue
        last = name.rpartition(".")[2]
        scaled = name.removesuffix("_inv").rpartition("_")[0] if name.endswith(_SCALES) else None
        if (
            entry.dtype.startswith(_NARROW_FLOATS)
            or (entry.dtype in _BYTES and len(entry.shape) > 1 and not _TABLE.search(last))
            or (entry.dtype in _INTEGERS and last in _WEIGHTS)
            or (scaled in tensors and scaled not in parts)
            or last == _SMOOTHING
        ):
            return name
    return None


def _not_described(
    place: Callable[[str], str], section: Section | None, name: str, entry: TensorEntry
) -> UnsupportedModelError:
    tensor = f"{place(entry.shard)}: tensor {name} ({entry.dtype})"
    if section is None:
        files = ", ".join(SIDE_FILES)
        return UnsupportedModelError(
            f"{tensor} belongs to a quantised weight, and neither config.json (quantization_config) nor one "
            f"of {files} tells its format: add the file that was published with the model"
        )
    return UnsupportedModelError(
        f"{tensor} belongs to a quantised weight, which {section.method} of {section.file} does not read: "
        f"{_REMEDY}"
    )
