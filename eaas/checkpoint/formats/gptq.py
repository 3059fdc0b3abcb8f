"""GPTQ (`quant_method` gptq, 4 or 8 bits), as AutoGPTQ and gptqmodel write it.

Tensors: X.qweight (I32, (K * bits / 32, N)), X.qzeros (I32, (G, N * bits / 32)), X.scales (float, (G, N)),
X.g_idx (I32, (K): the group of each input; `desc_act` orders them by importance).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from eaas.checkpoint.formats.codes import input_order, join_halves, unpack_words
from eaas.checkpoint.formats.stored import Entry, StoredFormat, StoredMatrix, Unreadable, parts_of
from eaas.checkpoint.quantized import QuantizedMatrix, WeightFormat

if TYPE_CHECKING:
    import torch

__all__ = ["gptq_matrices"]

_QWEIGHT = ".qweight"
_FORMATS = {4: WeightFormat.INT4, 8: WeightFormat.INT8}
# The first version stores a zero point less 1, with a borrow from the next one in the word: added to a word.
_LESS = {"gptq": {4: 0x11111111, 8: 0x01010101}, "gptq_v2": {4: 0, 8: 0}}


def gptq_matrices(
    config: Mapping[str, Any], tensors: Mapping[str, Entry]
) -> Iterator[StoredMatrix]:
    """Find the matrices (a `Reader`)."""
    version = config.get("checkpoint_format", "gptq")
    if version not in _LESS:
        raise Unreadable(
            f"gptq with checkpoint_format {version!r} is not supported (supported: {', '.join(_LESS)})"
        )
    bits, group = int(config["bits"]), int(config["group_size"])
    if bits not in _FORMATS:
        raise Unreadable(f"gptq with {bits} bits is not supported (supported: 4, 8)")
    for key, entry in tensors.items():
        if not key.endswith(_QWEIGHT):
            continue
        name = key.removesuffix(_QWEIGHT)
        parts = parts_of(name, ("qweight", "qzeros", "scales"), tensors)
        if f"{name}.g_idx" in tensors:
            parts["g_idx"] = f"{name}.g_idx"
        words, rows = entry.shape
        inputs = words * 32 // bits
        yield StoredMatrix(
            f"{name}.weight",
            StoredFormat(
                _FORMATS[bits],
                max(0, group),
                not config.get("sym", True),
                bool(config.get("desc_act")),
            ),
            (rows, inputs),
            parts,
            partial(_assemble, bits, group, _LESS[version][bits]),
        )


def _assemble(
    bits: int, group: int, less: int, parts: Mapping[str, torch.Tensor]
) -> QuantizedMatrix:
    import torch

    words_NW = parts["qweight"].t().contiguous()
    rows = len(words_NW)
    inputs = words_NW.shape[1] * 32 // bits
    group = group if 0 < group < inputs else inputs
    scales_NG = parts["scales"].t().to(torch.float32).contiguous()
    groups = -(-inputs // group)
    if scales_NG.shape != (rows, groups):
        raise Unreadable(f"scales of {tuple(scales_NG.shape)} instead of {(rows, groups)}")
    zeros_NG = unpack_words(parts["qzeros"] + less, bits, rows).t().contiguous()
    order = input_order(parts["g_idx"], group) if "g_idx" in parts else None
    # Words of consecutive inputs, the first one lowest: the bytes of a matrix.
    codes = words_NW.view(torch.uint8)
    if order is not None:
        codes = unpack_words(words_NW, bits, inputs)[:, order]
        codes = join_halves(codes) if bits == 4 else codes
    return _symmetric(
        QuantizedMatrix(_FORMATS[bits], inputs, group, codes, scales_NG, zeros_NG, order)
    )


def _symmetric(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Drop zero points that say what their absence says."""
    assert matrix.zeros is not None
    is_symmetric = bool((matrix.zeros == matrix.format.zero).all())
    return replace(matrix, zeros=None) if is_symmetric else matrix
