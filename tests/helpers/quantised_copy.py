"""Quantised copies of small bf16 or float32 checkpoints, in the formats that published models have."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

__all__ = ["block_fp8_copy", "mxfp4_copy", "to_block_fp8", "to_mxfp4"]

_BLOCK = 128
_E4M3_MAX = 448.0
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_HALFWAY = (_E2M1[1:] + _E2M1[:-1]) / 2

Tensors = dict[str, torch.Tensor]


def block_fp8_copy(source: Path, target: Path) -> Path:
    """Copy a checkpoint with all linear layers of its decoder but the routers in block FP8."""
    config = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [_BLOCK, _BLOCK],
    }
    return _copy(source, target, config, _fp8_entry)


def mxfp4_copy(source: Path, target: Path) -> Path:
    """Copy a gpt_oss checkpoint with its experts in MXFP4. H and I are multiples of 32."""
    config = {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    }
    return _copy(source, target, config, _mxfp4_entry)


def to_block_fp8(weight_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to e4m3 with a float32 scale for each block of 128 x 128: the largest weight becomes 448."""
    outputs, inputs = weight_NK.shape
    rows, columns = -(-outputs // _BLOCK), -(-inputs // _BLOCK)
    scales_RC = torch.ones(rows, columns)
    codes_NK = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            place = tuple(slice(at * _BLOCK, (at + 1) * _BLOCK) for at in (row, column))
            block = weight_NK[place].float()
            if block.any():
                scales_RC[row, column] = block.abs().max() / _E4M3_MAX
            codes_NK[place] = (block / scales_RC[row, column]).to(torch.float8_e4m3fn)
    return codes_NK, scales_RC


def to_mxfp4(weight_ENK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to e2m1, rounded to the nearest, with an exponent for each 32 inputs.

    Returns blocks (E, N, K / 32, 16), two codes in a byte, lower half first, and exponents (E, N, K / 32).
    The exponent is that of the largest weight less 2, which is e2m1's own; a larger weight becomes 6.
    """
    groups = weight_ENK.float().unflatten(-1, (-1, 32))
    amax = groups.abs().amax(-1)
    exponents = torch.where(amax > 0, amax.log2().floor() - 2, 0.0).clamp(-127, 127)
    scaled = (groups / exponents.exp2()[..., None]).contiguous()
    codes = torch.bucketize(scaled.abs(), _HALFWAY) + 8 * (scaled < 0)
    codes = codes.to(torch.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks, (exponents + 127).to(torch.uint8)


def _copy(
    source: Path, target: Path, config: dict[str, Any], convert: Callable[[str, Any], Tensors]
) -> Path:
    target.mkdir()
    for file in source.iterdir():
        if ".safetensors" not in file.name:
            shutil.copy(file, target)
    tensors: Tensors = {}
    for shard in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            tensors |= convert(name, tensor)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return target


def _fp8_entry(name: str, tensor: torch.Tensor) -> Tensors:
    is_linear = name.endswith(
        ("proj.weight", "proj_with_mqa.weight", "w1.weight", "w2.weight", "w3.weight")
    )
    if ".layers." not in name or not is_linear or tensor.dim() != 2:
        return {name: tensor}
    codes, scales = to_block_fp8(tensor)
    return {name: codes, f"{name}_scale_inv": scales}


def _mxfp4_entry(name: str, tensor: torch.Tensor) -> Tensors:
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    blocks, scales = to_mxfp4(tensor.transpose(1, 2))
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}
