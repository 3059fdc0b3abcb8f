"""compressed-tensors (`quant_method` compressed-tensors), as llm-compressor writes it; weights only.

Formats pack-quantized (int4, int8 in words), int-quantized (int8), float-quantized (e4m3), naive-quantized.
Tensors: X.weight_packed (I32, (N, K * bits / 32)) or X.weight (I8 or F8_E4M3, (N, K)); X.weight_scale
((N, G), (N, 1), (1), or blocks); X.weight_zero_point and X.weight_g_idx, if there are any; X.weight_shape.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from eaas.checkpoint.formats.codes import by_channel, input_order, join_halves, unpack_words
from eaas.checkpoint.formats.fp8 import scaled_matrices
from eaas.checkpoint.formats.stored import Entry, StoredFormat, StoredMatrix, Unreadable
from eaas.checkpoint.quantized import QuantizedMatrix, WeightFormat

if TYPE_CHECKING:
    import torch

__all__ = ["compressed_matrices"]

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
_PACKED, _WEIGHT = ".weight_packed", ".weight"
_INTEGERS = {4: WeightFormat.INT4, 8: WeightFormat.INT8}
_OPTIONAL = {"zeros": "_zero_point", "groups": "_g_idx", "shape": "_shape"}


def compressed_matrices(
    config: Mapping[str, Any], tensors: Mapping[str, Entry]
) -> Iterator[StoredMatrix]:
    """Find the matrices (a `Reader`)."""
    schemes = list(config.get("config_groups", {}).values())
    for name in {config.get("format"), *(scheme.get("format") for scheme in schemes)} - {None}:
        if name not in (*_FORMATS, "mixed-precision"):
            raise Unreadable(
                f"compressed-tensors format {name!r} is not supported (supported: {', '.join(_FORMATS)})"
            )
    if config.get("sparsity_config"):
        raise Unreadable("compressed-tensors with a sparsity_config is not supported")
    blocks = {
        tuple(scheme["weights"]["block_structure"])
        for scheme in schemes
        if (scheme.get("weights") or {}).get("block_structure")
    }
    if len(blocks) > 1:
        raise Unreadable(f"compressed-tensors with blocks of several sizes, {sorted(blocks)}")
    yield from scaled_matrices(tensors, next(iter(blocks), (1, 0)))
    for key, entry in tensors.items():
        is_packed = key.endswith(_PACKED)
        if not is_packed and not (key.endswith(_WEIGHT) and entry.dtype == "I8"):
            continue
        module = key.removesuffix(_PACKED if is_packed else _WEIGHT)
        weights = _scheme(schemes, module)
        bits, group = int(weights["num_bits"]), int(weights.get("group_size") or 0)
        if bits not in _INTEGERS or weights.get("type", "int") != "int" or entry.dtype == "U8":
            raise Unreadable(
                f"{key}: {weights.get('type', 'int')} of {bits} bits is not supported in words "
                "(supported: int4, int8)"
            )
        if weights.get("strategy") == "block":
            raise Unreadable(f"{key}: integers in blocks are not supported")
        weight = module + _WEIGHT
        parts = {"codes": key, "scales": f"{weight}_scale"}
        if parts["scales"] not in tensors:
            raise Unreadable(f"{key} has no {parts['scales']}")
        for part, suffix in _OPTIONAL.items():
            if weight + suffix in tensors:
                parts[part] = weight + suffix
        *outer, rows, words = entry.shape
        inputs = words * 32 // bits if is_packed else words
        yield StoredMatrix(
            weight,
            StoredFormat(
                _INTEGERS[bits],
                max(0, group),
                has_zeros="zeros" in parts,
                has_order="groups" in parts,
                has_short_scales=tensors[parts["scales"]].dtype == "BF16",
            ),
            (*outer, rows, inputs),
            parts,
            partial(_assemble, bits, max(0, group), is_packed),
        )


def _scheme(schemes: list[Mapping[str, Any]], module: str) -> Mapping[str, Any]:
    """Return how a module's weights are quantised: by a target that names it, else by one of a class."""
    named = [s for s in schemes if any(_names(target, module) for target in s.get("targets", ()))]
    of_class = [s for s in schemes if s not in named and "Linear" in s.get("targets", ())]
    for scheme in (*named, *of_class, *schemes):
        weights = scheme.get("weights")
        if weights:
            found: Mapping[str, Any] = weights
            return found
    raise Unreadable(f"{module} is quantised, but no target of config_groups names it")


def _names(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return module == target or module.endswith("." + target)


def _assemble(
    bits: int, group: int, is_packed: bool, parts: Mapping[str, torch.Tensor]
) -> QuantizedMatrix:
    import torch

    stored = parts["codes"]
    rows = len(stored)
    inputs = stored.shape[1] * (32 // bits if is_packed else 1)
    if "shape" in parts:
        wanted = tuple(parts["shape"].tolist())
        if wanted[:-1] != (rows,) or not inputs - 32 // bits < wanted[-1] <= inputs:
            raise Unreadable(f"weight_shape {wanted} does not fit the weights {(rows, inputs)}")
        inputs = wanted[-1]
    group = group if 0 < group < inputs else inputs
    scales_NG = by_channel(parts["scales"], rows, inputs, (1, group))
    group = inputs if scales_NG.shape[1] == 1 else group
    order = input_order(parts["groups"], group) if "groups" in parts else None
    format = _INTEGERS[bits]
    if is_packed and order is None:
        # Words of consecutive inputs, the first one lowest: the bytes of a matrix.
        codes = stored.contiguous().view(torch.uint8)[:, : -(-inputs * bits // 8)]
    else:
        codes = unpack_words(stored, bits, inputs) if is_packed else _unsigned(stored, format)
        codes = codes if order is None else codes[:, order]
        codes = join_halves(codes) if bits == 4 else codes
    zeros_NG = None
    if "zeros" in parts:
        zeros = parts["zeros"]
        is_packed = zeros.dtype == torch.int32
        zeros = unpack_words(zeros.t(), bits, rows).t() if is_packed else _unsigned(zeros, format)
        zeros_NG = zeros.reshape(-1, scales_NG.shape[1]).expand(scales_NG.shape).contiguous()
    return QuantizedMatrix(format, inputs, group, codes, scales_NG, zeros_NG, order)


def _unsigned(codes: torch.Tensor, format: WeightFormat) -> torch.Tensor:
    import torch

    return (codes.to(torch.int16) + format.zero).to(torch.uint8)
