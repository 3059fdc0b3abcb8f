"""MXFP4 (`quant_method` mxfp4, as gpt-oss is published): e2m1 codes, a power of two for 32 inputs.

Tensors: X_blocks (U8, (E, N, G, 16); the even input in the lower half of a byte) and X_scales (U8, e8m0,
(E, N, G)).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from eaas.checkpoint.formats.stored import StoredFormat, StoredMatrix, Tensors, Unreadable
from eaas.checkpoint.quantized import MXFP4, QuantizedMatrix

if TYPE_CHECKING:
    import torch

__all__ = ["mxfp4_matrices"]

_GROUP = 32
_BLOCKS, _SCALES = "_blocks", "_scales"


def mxfp4_matrices(config: Mapping[str, Any], tensors: Tensors) -> Iterator[StoredMatrix]:
    """Find the matrices (a `Reader`)."""
    for blocks, entry in tensors.items():
        if not blocks.endswith(_BLOCKS):
            continue
        name = blocks.removesuffix(_BLOCKS)
        scales = name + _SCALES
        if scales not in tensors:
            raise Unreadable(f"{blocks} has no {scales}")
        *outer, groups, block_bytes = entry.shape
        if entry.dtype != "U8" or block_bytes * 2 != _GROUP or tensors[scales].dtype != "U8":
            raise Unreadable(f"{blocks} is not in blocks of {_GROUP} inputs, 16 bytes each")
        if tensors[scales].shape != (*outer, groups):
            raise Unreadable(f"{scales} is {tensors[scales].shape} instead of {(*outer, groups)}")
        yield StoredMatrix(
            name,
            StoredFormat(MXFP4, _GROUP),
            (*outer, groups * _GROUP),
            {"codes": blocks, "scales": scales},
            _assemble,
        )


def _assemble(parts: Mapping[str, torch.Tensor]) -> QuantizedMatrix:
    codes = parts["codes"].flatten(1)
    return QuantizedMatrix(MXFP4, codes.shape[1] * 2, _GROUP, codes, parts["scales"])
