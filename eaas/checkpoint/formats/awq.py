"""AWQ (`quant_method` awq, version gemm, 4 bits), as AutoAWQ writes it.

Tensors: X.qweight (I32, (K, N / 8)), X.qzeros (I32, (G, N / 8)), X.scales (float, (G, N)). A word has 8
consecutive channels, in the order that AutoAWQ's kernels unpack fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from eaas.checkpoint.formats.codes import group_of, join_halves, number, one_of, unpack_words
from eaas.checkpoint.formats.stored import StoredFormat, StoredMatrix, Tensors, Unreadable, parts_of
from eaas.checkpoint.quantized import INT4, QuantizedMatrix

if TYPE_CHECKING:
    import torch

__all__ = ["awq_matrices"]

_QWEIGHT = ".qweight"
# Place in a word of each of its 8 channels.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def awq_matrices(config: Mapping[str, Any], tensors: Tensors) -> Iterator[StoredMatrix]:
    """Find the matrices (a `Reader`)."""
    default = "llm-awq" if config.get("backend") == "llm-awq" else "gemm"
    version = one_of(config, ("version", "checkpoint_format", "format"), default)
    if version != "gemm":
        raise Unreadable(f"awq version {version!r} is not supported (supported: gemm, 4 bits)")
    for key, entry in tensors.items():
        if not key.endswith(_QWEIGHT):
            continue
        name = key.removesuffix(_QWEIGHT)
        parts = parts_of(name, ("qweight", "qzeros", "scales"), tensors)
        inputs, words = entry.shape
        groups, rows = tensors[parts["scales"]].shape
        zeros = tensors[parts["qzeros"]].shape
        if entry.dtype != "I32" or words * 8 != rows or zeros != (groups, words):
            raise Unreadable(
                f"{key} {entry.shape} of {entry.dtype} does not have 4 bits for the {rows} channels of its "
                f"scales, with zero points of {zeros}, as awq version gemm has (supported: 4 bits)"
            )
        group = group_of(name, inputs, groups, number(config, "group_size", "q_group_size"))
        yield StoredMatrix(
            f"{name}.weight",
            StoredFormat(INT4, group, has_zeros=True),
            (rows, inputs),
            parts,
            partial(_assemble, min(group or inputs, inputs)),
        )


def _assemble(group: int, parts: Mapping[str, torch.Tensor]) -> QuantizedMatrix:
    import torch

    inputs = len(parts["qweight"])
    scales_NG = parts["scales"].t().to(torch.float32).contiguous()
    codes_NK = _channels(parts["qweight"])
    zeros_NG = _channels(parts["qzeros"])
    return QuantizedMatrix(INT4, inputs, group, join_halves(codes_NK), scales_NG, zeros_NG)


def _channels(words_RW: torch.Tensor) -> torch.Tensor:
    """Unpack rows of words to channels: int32 (R, W) -> uint8 (8 W, R)."""
    rows, words = words_RW.shape
    codes = unpack_words(words_RW, 4, words * 8).view(rows, words, 8)[:, :, list(_PLACES)]
    return codes.flatten(1).t().contiguous()
