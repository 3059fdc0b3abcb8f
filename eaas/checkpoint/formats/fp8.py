"""FP8 (`quant_method` fp8, as DeepSeek and Qwen publish it; modelopt): e4m3, scales of blocks or channels.

Tensors: X (F8_E4M3), X_scale_inv or X_scale (any float; what a code is multiplied by).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from eaas.checkpoint.formats.codes import block_of, by_channel
from eaas.checkpoint.formats.stored import StoredFormat, StoredMatrix, Tensors, Unreadable
from eaas.checkpoint.quantized import FP8, QuantizedMatrix

if TYPE_CHECKING:
    import torch

__all__ = ["fp8_matrices", "modelopt_matrices", "scaled_matrices"]

# Its names in DeepSeek's sections, and in MiniMax's.
_E4M3 = ("e4m3", "e4m3fn", "float8_e4m3", "float8_e4m3fn")
_SUFFIXES = ("_scale_inv", "_scale")
# Inputs and rows of a block where a section names none, as in transformers.
_BLOCK = (128, 128)
# ModelOpt's, by quant_algo: a scale for the matrix, for a channel, for a block.
_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")


def fp8_matrices(config: Mapping[str, Any], tensors: Tensors) -> Iterator[StoredMatrix]:
    """Find the matrices (a `Reader`)."""
    if str(config.get("fmt") or _E4M3[0]).lower() not in _E4M3:
        raise Unreadable(f"fp8 with fmt {config['fmt']!r} is not supported (supported: e4m3)")
    block = _BLOCK
    if "weight_block_size" in config:
        block = block_of(config, "weight_block_size") if config["weight_block_size"] else (1, 0)
    yield from scaled_matrices(tensors, block)


def modelopt_matrices(config: Mapping[str, Any], tensors: Tensors) -> Iterator[StoredMatrix]:
    """Find the matrices of ModelOpt's FP8 exports (a `Reader`)."""
    algorithms = [config.get("quant_algo")]
    if algorithms == ["MIXED_PRECISION"]:
        layers: Mapping[str, Any] = config.get("quantized_layers") or {}
        algorithms = [layer.get("quant_algo") for layer in layers.values()]
    for algorithm in algorithms:
        if algorithm is not None and str(algorithm).upper() not in _ALGORITHMS:
            raise Unreadable(
                f"modelopt with quant_algo {algorithm!r} is not supported (supported: "
                f"{', '.join(_ALGORITHMS)})"
            )
    yield from scaled_matrices(tensors, _BLOCK)


def scaled_matrices(tensors: Tensors, block: tuple[int, int]) -> Iterator[StoredMatrix]:
    """Find e4m3 tensors and their scales; `block`: rows and inputs of a block, (1, 0) if there are none."""
    for name, entry in tensors.items():
        if not entry.dtype.startswith("F8_") or entry.dtype == "F8_E8M0":
            continue
        if entry.dtype != "F8_E4M3":
            raise Unreadable(
                f"{name} is {entry.dtype}, which is not supported (supported: F8_E4M3)"
            )
        scale = next((name + suffix for suffix in _SUFFIXES if name + suffix in tensors), None)
        if scale is None:
            raise Unreadable(f"{name} is F8_E4M3 without {name}_scale_inv or {name}_scale")
        used = _block(tensors[scale].shape, entry.shape, block)
        if used is None:
            raise Unreadable(
                f"{scale} is {tensors[scale].shape}, which does not fit {name}, {entry.shape}, in "
                f"blocks of {block}"
            )
        yield StoredMatrix(
            name,
            StoredFormat(FP8, used[1]),
            entry.shape,
            {"codes": name, "scales": scale},
            partial(_assemble, used),
        )


def _block(
    scales: tuple[int, ...], weights: tuple[int, ...], block: tuple[int, int]
) -> tuple[int, int] | None:
    """Return the block that the scales are for: the given one, or (1, 0) for a channel or a whole matrix."""
    *experts, rows, inputs = weights
    of_matrix = scales[len(experts) :]
    if len(of_matrix) == 4 and of_matrix[1] == of_matrix[3] == 1:
        # ModelOpt keeps a block's dimensions.
        of_matrix = of_matrix[::2]
    if block[1] and of_matrix == (-(-rows // block[0]), -(-inputs // block[1])):
        return block
    return (1, 0) if of_matrix in ((), (1,), (1, 1), (rows,), (rows, 1)) else None


def _assemble(block: tuple[int, int], parts: Mapping[str, torch.Tensor]) -> QuantizedMatrix:
    import torch

    codes = parts["codes"].view(torch.uint8)
    rows, inputs = codes.shape
    stored = parts["scales"]
    stored = stored[:, 0, :, 0] if stored.dim() == 4 else stored
    scales = by_channel(stored, rows, inputs, (block[0], block[1] or inputs))
    group = inputs if scales.shape[1] == 1 else block[1]
    return QuantizedMatrix(FP8, inputs, group, codes, scales)
