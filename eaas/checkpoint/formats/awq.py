"""AWQ (`quant_method` awq, version gemm, 4 bits), as AutoAWQ writes it.

Tensors: X.qweight (I32, (K, N / 8)), X.qzeros (I32, (G, N / 8)), X.scales (float, (G, N)). A word has 8
consecutive channels, in the order that AutoAWQ's kernels unpack fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from eaas.checkpoint.formats.codes import join_halves, unpack_words
from eaas.checkpoint.formats.stored import Entry, StoredFormat, StoredMatrix, Unreadable, parts_of
from eaas.checkpoint.quantized import QuantizedMatrix, WeightFormat

if TYPE_CHECKING:
    import torch

__all__ = ["awq_matrices"]

_QWEIGHT = ".qweight"
# Place in a word of each of its 8 channels.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def awq_matrices(config: Mapping[str, Any], tensors: Mapping[str, Entry]) -> Iterator[StoredMatrix]:
    """Find the matrices (a `Reader`)."""
    version = str(config.get("version", "gemm")).lower()
    bits = int(config.get("bits", config.get("w_bit", 4)))
    group = int(config.get("group_size", config.get("q_group_size", 128)))
    if version != "gemm" or bits != 4:
        raise Unreadable(
            f"awq version {version!r} with {bits} bits is not supported (supported: gemm, 4 bits)"
        )
    for key, entry in tensors.items():
        if not key.endswith(_QWEIGHT):
            continue
        name = key.removesuffix(_QWEIGHT)
        parts = parts_of(name, ("qweight", "qzeros", "scales"), tensors)
        inputs, words = entry.shape
        yield StoredMatrix(
            f"{name}.weight",
            StoredFormat(WeightFormat.INT4, max(0, group), has_zeros=True),
            (words * 8, inputs),
            parts,
            partial(_assemble, group),
        )


def _assemble(group: int, parts: Mapping[str, torch.Tensor]) -> QuantizedMatrix:
    import torch

    inputs, words = parts["qweight"].shape
    group = group if 0 < group < inputs else inputs
    scales_NG = parts["scales"].t().to(torch.float32).contiguous()
    wanted = (words * 8, -(-inputs // group))
    if scales_NG.shape != wanted:
        raise Unreadable(f"scales of {tuple(scales_NG.shape)} instead of {wanted}")
    codes_NK = _channels(parts["qweight"])
    zeros_NG = _channels(parts["qzeros"])
    return QuantizedMatrix(
        WeightFormat.INT4, inputs, group, join_halves(codes_NK), scales_NG, zeros_NG
    )


def _channels(words_RW: torch.Tensor) -> torch.Tensor:
    """Unpack rows of words to channels: int32 (R, W) -> uint8 (8 W, R)."""
    rows, words = words_RW.shape
    codes = unpack_words(words_RW, 4, words * 8).view(rows, words, 8)[:, :, list(_PLACES)]
    return codes.flatten(1).t().contiguous()
