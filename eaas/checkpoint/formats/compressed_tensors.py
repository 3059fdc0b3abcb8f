"""compressed-tensors (`quant_method` compressed-tensors), as llm-compressor writes it; weights only.

Formats pack-quantized (int4, int8 in words), int-quantized (int8), float-quantized (e4m3), naive-quantized.
Tensors: X.weight_packed (I32, (N, K * bits / 32)) or X.weight (I8 or F8_E4M3, (N, K)); X.weight_scale
((N, G), (N, 1), (1), or blocks); X.weight_zero_point and X.weight_g_idx, if there are any; X.weight_shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from eaas.checkpoint.formats.codes import (
    block_of,
    by_channel,
    group_of,
    input_order,
    join_halves,
    matches,
    number,
    unpack_words,
)
from eaas.checkpoint.formats.fp8 import scaled_matrices
from eaas.checkpoint.formats.stored import StoredFormat, StoredMatrix, Tensors, Unreadable
from eaas.checkpoint.header import TensorEntry
from eaas.checkpoint.quantized import INTEGERS, QuantizedMatrix, WeightFormat

if TYPE_CHECKING:
    import torch

__all__ = ["compressed_matrices"]

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
_PACKED, _WEIGHT = ".weight_packed", ".weight"
# Values of `actorder` with which each input has a group of its own.
_ORDERED = ("group", "dynamic", True)
_OPTIONAL = {"zeros": "_zero_point", "groups": "_g_idx", "shape": "_shape"}


def compressed_matrices(config: Mapping[str, Any], tensors: Tensors) -> Iterator[StoredMatrix]:
    """Find the matrices (a `Reader`)."""
    schemes: list[Mapping[str, Any]] = list((config.get("config_groups") or {}).values())
    _check(config, schemes)
    blocks = {block for scheme in schemes if (block := _block(scheme.get("weights") or {}))}
    if len(blocks) > 1:
        raise Unreadable(f"compressed-tensors with blocks of several sizes, {sorted(blocks)}")
    yield from scaled_matrices(tensors, next(iter(blocks), (1, 0)))
    for key, entry in tensors.items():
        is_packed = key.endswith(_PACKED)
        if not is_packed and not (key.endswith(_WEIGHT) and entry.dtype == "I8"):
            continue
        module = key.removesuffix(_PACKED if is_packed else _WEIGHT)
        weight = module + _WEIGHT
        parts = {"codes": key, "scales": f"{weight}_scale"}
        if parts["scales"] not in tensors:
            raise Unreadable(f"{key} has no {parts['scales']}")
        for part, suffix in _OPTIONAL.items():
            if weight + suffix in tensors:
                parts[part] = weight + suffix
        weights = _weights(schemes, module)
        for part, is_needed in (
            ("zeros", not weights.get("symmetric", True)),
            ("groups", weights.get("actorder") in _ORDERED),
        ):
            if is_needed and part not in parts:
                raise Unreadable(f"{key} has no {weight}{_OPTIONAL[part]}")
        shapes = {part: tensors[stored].shape for part, stored in parts.items()}
        bits = _bits(key, entry, weights, shapes)
        *outer, rows, words = entry.shape
        inputs = words * 32 // bits if is_packed else words
        scales = shapes["scales"]
        groups = scales[-1] if len(scales) > 1 else 1
        group = group_of(key, inputs, groups, number(weights, "group_size"))
        yield StoredMatrix(
            weight,
            StoredFormat(
                INTEGERS[bits],
                group,
                has_zeros="zeros" in parts,
                has_order="groups" in parts,
                has_short_scales=tensors[parts["scales"]].dtype == "BF16",
            ),
            (*outer, rows, inputs),
            parts,
            partial(_assemble, bits, group, is_packed),
        )


def _check(config: Mapping[str, Any], schemes: list[Mapping[str, Any]]) -> None:
    """Raise Unreadable for variants that are not supported."""
    for name in {config.get("format"), *(scheme.get("format") for scheme in schemes)} - {None}:
        if name not in (*_FORMATS, "mixed-precision"):
            raise Unreadable(
                f"compressed-tensors format {name!r} is not supported (supported: {', '.join(_FORMATS)})"
            )
    if config.get("sparsity_config"):
        raise Unreadable("compressed-tensors with a sparsity_config is not supported")
    transforms = config.get("transform_config") or {}
    steps = [
        step.get("location")
        for transform in transforms.get("config_groups", transforms).values()
        for step in transform.get("apply", ({},))
    ]
    for location in steps:
        # Those at a weight are already in the weights.
        if location not in ("weight_input", "weight_output"):
            raise Unreadable(
                f"compressed-tensors with a transform_config that transforms the {location} of modules is "
                "not supported"
            )
    patterns = {
        "targets": [target for scheme in schemes for target in scheme.get("targets") or ()],
        "ignore": config.get("ignore") or (),
    }
    for field, names in patterns.items():
        for name in names:
            _names(field, name, "")


def _block(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and inputs of a block; None: a scheme without blocks or groups."""
    if weights.get("block_structure"):
        return block_of(weights, "block_structure")
    group = number(weights, "group_size")
    return (1, group) if weights.get("type") == "float" and group and group > 0 else None


def _weights(schemes: list[Mapping[str, Any]], module: str) -> Mapping[str, Any]:
    """Return how a module's weights are quantised: by a target that names it, else by one of a class."""
    named = [
        scheme
        for scheme in schemes
        if any(_names("targets", target, module) for target in scheme.get("targets") or ())
    ]
    of_class = [s for s in schemes if s not in named and "Linear" in (s.get("targets") or ())]
    for scheme in (*named, *of_class, *schemes):
        weights = scheme.get("weights")
        if weights:
            found: Mapping[str, Any] = weights
            return found
    raise Unreadable(f"{module} is quantised, but no target of config_groups names it")


def _names(field: str, target: str, module: str) -> bool:
    if target.startswith("re:"):
        return matches(field, target.removeprefix("re:"), module)
    return module == target or module.endswith("." + target)


def _bits(
    key: str, entry: TensorEntry, weights: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> int:
    """Return the bits of a code: the stated ones, unless only others fit the zero points or the groups."""
    stated, kind = number(weights, "num_bits"), str(weights.get("type", "int"))
    if kind != "int" or entry.dtype not in ("I8", "I32"):
        raise Unreadable(
            f"{key}: {kind} of {stated} bits in {entry.dtype} is not supported (supported: int4, int8)"
        )
    if weights.get("strategy") == "block":
        raise Unreadable(f"{key}: integers in blocks are not supported")
    if entry.dtype == "I8":
        return 8
    *_, rows, words = entry.shape
    group = number(weights, "group_size") or 0
    zeros, scales = shapes.get("zeros"), shapes["scales"]
    groups = scales[-1] if len(scales) > 1 else 1

    def fits(bits: int) -> bool:
        if zeros is not None and len(zeros) > 1 and zeros[0] != rows:
            return bool(zeros[0] == -(-rows * bits // 32))
        return groups == 1 or (group > 0 and -(-(words * 32 // bits) // group) == groups)

    candidates = [bits for bits in INTEGERS if fits(bits)]
    bits = stated if stated in candidates or len(candidates) != 1 else candidates[0]
    if bits not in INTEGERS:
        raise Unreadable(f"{key}: int of {bits} bits is not supported (supported: int4, int8)")
    return bits


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
    format = INTEGERS[bits]
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
