"""GPTQ (`quant_method` gptq, 4 or 8 bits), as AutoGPTQ and gptqmodel write it.

Tensors: X.qweight (I32, (K * bits / 32, N)), X.qzeros (I32, (G, N * bits / 32)), X.scales (float, (G, N)),
X.g_idx (I32, (K): the group of each input; `desc_act` orders them by importance).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from eaas.checkpoint.formats.codes import (
    group_of,
    input_order,
    join_halves,
    matches,
    number,
    one_of,
    unpack_words,
)
from eaas.checkpoint.formats.stored import StoredFormat, StoredMatrix, Tensors, Unreadable, parts_of
from eaas.checkpoint.quantized import INTEGERS, QuantizedMatrix

if TYPE_CHECKING:
    import torch

__all__ = ["gptq_matrices"]

_QWEIGHT = ".qweight"
# Bits that the tools write.
_WIDTHS = (2, 3, 4, 8)
# The first version stores a zero point less 1, with a borrow from the next one in the word: added to a word.
_LESS = {"gptq": {4: 0x11111111, 8: 0x01010101}, "gptq_v2": {4: 0, 8: 0}}


def gptq_matrices(config: Mapping[str, Any], tensors: Tensors) -> Iterator[StoredMatrix]:
    """Find the matrices (a `Reader`)."""
    version = "marlin" if config.get("is_marlin_format") else "gptq"
    version = one_of(config, ("checkpoint_format", "format"), version)
    if version not in _LESS:
        raise Unreadable(
            f"gptq with checkpoint_format {version!r} is not supported (supported: {', '.join(_LESS)})"
        )
    if config.get("adapter"):
        raise Unreadable(
            "gptq with an adapter, which is computed beside the weights, is not supported"
        )
    for key, entry in tensors.items():
        if not key.endswith(_QWEIGHT):
            continue
        name = key.removesuffix(_QWEIGHT)
        parts = parts_of(name, ("qweight", "qzeros", "scales"), tensors)
        if f"{name}.g_idx" in tensors:
            parts["g_idx"] = f"{name}.g_idx"
        rule, settings = _settings(config, name)
        if settings.get("desc_act") and "g_idx" not in parts:
            raise Unreadable(f"{name} has no {name}.g_idx, the order of its inputs (desc_act)")
        shapes = {part: tensors[stored].shape for part, stored in parts.items()}
        bits = _bits(name, rule, number(settings, "bits"), shapes)
        if entry.dtype != "I32" or bits not in INTEGERS:
            raise Unreadable(
                f"gptq with {bits} bits in {entry.dtype} ({key}, by {rule}) is not supported "
                "(supported: 4, 8 in I32)"
            )
        words, rows = entry.shape
        inputs = words * 32 // bits
        group = group_of(name, inputs, shapes["scales"][0], number(settings, "group_size"))
        yield StoredMatrix(
            f"{name}.weight",
            StoredFormat(
                INTEGERS[bits],
                group,
                # All files have zero points. Kernels for int4 are not slower with them.
                has_zeros=bits == 4 or not settings.get("sym"),
                has_order=bool(settings.get("desc_act")),
            ),
            (rows, inputs),
            parts,
            partial(_assemble, bits, min(group or inputs, inputs), _LESS[version][bits]),
        )


def _settings(config: Mapping[str, Any], module: str) -> tuple[str, Mapping[str, Any]]:
    """Return a module's settings: those of the first rule of `dynamic` that fits, over the section's."""
    rules: Mapping[str, Any] = config.get("dynamic") or {}
    for rule, settings in rules.items():
        # "-:" is not quantised. A module that is, in spite of that, has the section's settings.
        if not rule.startswith("-:") and matches("dynamic", rule.removeprefix("+:"), module):
            return f"rule {rule!r} of dynamic", {**config, **(settings or {})}
    return "the section", config


def _bits(module: str, rule: str, stated: int | None, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the bits of a code, by the shapes: published sections may state others."""
    (words, rows), (groups, zero_words) = shapes["qweight"], shapes["qzeros"]
    if shapes["scales"] == (groups, rows):
        for bits in (stated or 0, *_WIDTHS):
            inputs = shapes["g_idx"][0] if "g_idx" in shapes else words * 32 // (bits or 1)
            fits = (zero_words, words) == (-(-rows * bits // 32), -(-inputs * bits // 32))
            if bits in _WIDTHS and fits:
                return bits
    raise Unreadable(
        f"{module}: qweight {shapes['qweight']}, qzeros {shapes['qzeros']} and scales {shapes['scales']} "
        f"do not fit one another, with the {stated} bits of {rule} or others"
    )


def _assemble(
    bits: int, group: int, less: int, parts: Mapping[str, torch.Tensor]
) -> QuantizedMatrix:
    import torch

    words_NW = parts["qweight"].t().contiguous()
    rows = len(words_NW)
    inputs = words_NW.shape[1] * 32 // bits
    scales_NG = parts["scales"].t().to(torch.float32).contiguous()
    zeros_NG = unpack_words(parts["qzeros"] + less, bits, rows).t().contiguous()
    order = input_order(parts["g_idx"], group) if "g_idx" in parts else None
    # Words of consecutive inputs, the first one lowest: the bytes of a matrix.
    codes = words_NW.view(torch.uint8)
    if order is not None:
        codes = unpack_words(words_NW, bits, inputs)[:, order]
        codes = join_halves(codes) if bits == 4 else codes
    return _symmetric(
        QuantizedMatrix(INTEGERS[bits], inputs, group, codes, scales_NG, zeros_NG, order)
    )


def _symmetric(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Drop zero points that say what their absence says."""
    assert matrix.zeros is not None
    is_symmetric = bool((matrix.zeros == matrix.format.zero).all())
    return replace(matrix, zeros=None) if is_symmetric else matrix
