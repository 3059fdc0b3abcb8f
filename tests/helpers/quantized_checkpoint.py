"""Checkpoints quantised in the formats that their makers publish, and the same weights dequantised.

The packing of each format is written here after its published layout; compressed-tensors packs by itself.
Every weight is rounded to the nearest value that the format has: there is no calibration. The tests of the
formats use these copies, too. N output channels, K inputs, G groups.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch.nn import functional

__all__ = ["SCHEMES", "Packed", "Scheme", "fp8", "gptq", "mxfp4", "quantized_copy"]

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass
class Packed:
    """Stored tensors of a weight, by what follows its module's name (after "_": its own), and their value."""

    tensors: dict[str, torch.Tensor]
    weight_NK: torch.Tensor


@dataclass
class Scheme:
    """A format with its settings.

    Attributes:
        config: Section `quantization_config` of config.json; empty: the copy is not quantised.
        pack: Packs a weight (N, K).
        atol: Largest difference of a reader's float32 values from the packed weight's.
        experts_only: Attention stays as it is.
        attention: Packs attention's weights; None: `pack` does.
        file: Where the section is, if not in config.json.
    """

    config: dict[str, Any]
    pack: Callable[[torch.Tensor], Packed]
    atol: float = 0.0
    experts_only: bool = False
    attention: Callable[[torch.Tensor], Packed] | None = None
    file: str = "config.json"


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes along the last dimension into int32, the first one lowest."""
    per_word = 32 // bits
    codes = functional.pad(codes.to(torch.int64), (0, -codes.shape[-1] % per_word))
    shifts = torch.arange(0, 32, bits)
    packed = (torch.unflatten(codes, -1, (-1, per_word)) << shifts).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def _grouped(
    weight_NK: torch.Tensor, group: int, bits: int, symmetric: bool, group_of_K: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round to integers with a scale and a zero point for each group: codes (N, K), scales, zeros (N, G)."""
    groups, top = -(-weight_NK.shape[1] // group), (1 << bits) - 1
    scales, zeros = torch.empty(len(weight_NK), groups), torch.empty(len(weight_NK), groups)
    for g in range(groups):
        part = weight_NK[:, group_of_K == g].float()
        if symmetric:
            scales[:, g] = part.abs().amax(1) / (top // 2)
            zeros[:, g] = (top + 1) / 2
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, g] = (high - low) / top
            zeros[:, g] = (-low / scales[:, g]).round()
    scales = scales.clamp(min=1e-6).half()
    codes = (weight_NK / scales.float()[:, group_of_K] + zeros[:, group_of_K]).round().clamp(0, top)
    return codes.to(torch.int64), scales, zeros.to(torch.int64)


def gptq(
    group: int, bits: int = 4, *, symmetric: bool = True, desc_act: bool = False, v2: bool = False
) -> Scheme:
    """GPTQ's layout with groups of so many inputs; -1: one group."""

    def pack(weight_NK: torch.Tensor) -> Packed:
        inputs = weight_NK.shape[1]
        size = inputs if group < 0 else group
        group_of_K = torch.arange(inputs) // size
        if desc_act:
            group_of_K = group_of_K[
                torch.randperm(inputs, generator=torch.Generator().manual_seed(1))
            ]
        codes, scales, zeros = _grouped(weight_NK, size, bits, symmetric, group_of_K)
        stored = _words(zeros.t(), bits)
        if not v2:
            stored -= {4: 0x11111111, 8: 0x01010101}[bits]
        tensors = {
            "qweight": _words(codes, bits).t().contiguous(),
            "qzeros": stored,
            "scales": scales.t().contiguous(),
            "g_idx": group_of_K.int(),
        }
        return Packed(tensors, scales.float()[:, group_of_K] * (codes - zeros[:, group_of_K]))

    return Scheme(
        {
            "quant_method": "gptq",
            "bits": bits,
            "group_size": group,
            "desc_act": desc_act,
            "sym": symmetric,
            "checkpoint_format": "gptq_v2" if v2 else "gptq",
        },
        pack,
    )


def _awq(group: int) -> Scheme:
    def turn(codes_RN: torch.Tensor) -> torch.Tensor:
        return _words(
            torch.unflatten(codes_RN, 1, (-1, 8))[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4
        )

    def pack(weight_NK: torch.Tensor) -> Packed:
        group_of_K = torch.arange(weight_NK.shape[1]) // group
        codes, scales, zeros = _grouped(weight_NK, group, 4, False, group_of_K)
        tensors = {
            "qweight": turn(codes.t()),
            "qzeros": turn(zeros.t()),
            "scales": scales.t().contiguous(),
        }
        return Packed(tensors, scales.float()[:, group_of_K] * (codes - zeros[:, group_of_K]))

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": "gemm",
    }
    return Scheme(config, pack)


def _mixed() -> Scheme:
    """GPTQ in 4 bits, attention in 8 bits by a rule, as gptqmodel writes it."""
    four, eight = gptq(32), gptq(32, 8)
    rules = {"+:.*self_attn\\..*": {"bits": 8, "group_size": 32}, "-:.*mlp\\.gate$": {}}
    return Scheme(four.config | {"dynamic": rules}, four.pack, attention=eight.pack)


def _modelopt(algorithm: str, scheme: Scheme) -> Scheme:
    """A scheme's codes, as ModelOpt names and shapes its scales."""

    def pack(weight_NK: torch.Tensor) -> Packed:
        packed = scheme.pack(weight_NK)
        scale = packed.tensors.pop("weight_scale_inv", None)
        if scale is not None:
            packed.tensors["weight_scale"] = scale[:, None, :, None].contiguous()
        packed.tensors["input_scale"] = torch.tensor(0.5)
        return packed

    section = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    config = {"producer": {"name": "modelopt", "version": "0.39.0"}, "quantization": section}
    return Scheme(config, pack, file="hf_quant_config.json")


def fp8(block: tuple[int, int] | None) -> Scheme:
    """e4m3 with a scale per block (`weight_scale_inv`) or for the whole matrix (`weight_scale`)."""

    def pack(weight_NK: torch.Tensor) -> Packed:
        rows, inputs = weight_NK.shape
        height, width = block or (rows, inputs)
        padded = functional.pad(weight_NK.float(), (0, -inputs % width, 0, -rows % height))
        blocks = torch.unflatten(torch.unflatten(padded, 0, (-1, height)), 2, (-1, width))
        scales = blocks.abs().amax((1, 3)).clamp(min=1e-9) / 448
        by_weight = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :inputs]
        codes = (weight_NK.float() / by_weight).to(torch.float8_e4m3fn)
        name = "weight_scale_inv" if block else "weight_scale"
        tensors = {"weight": codes, name: scales if block else scales.squeeze()}
        return Packed(tensors, codes.float() * by_weight)

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return Scheme(config | ({"weight_block_size": list(block)} if block else {}), pack)


def mxfp4() -> Scheme:
    """For a weight (N, K) or (E, N, K), K a multiple of 32."""

    def pack(weight: torch.Tensor) -> Packed:
        groups = torch.unflatten(weight.float(), -1, (-1, 32))
        exponents = torch.log2(groups.abs().amax(-1).clamp(min=2.0**-100)).floor() - 2
        scaled = groups / torch.exp2(exponents).unsqueeze(-1)
        codes = (scaled.unsqueeze(-1) - _E2M1).abs().argmin(-1).to(torch.uint8)
        tensors = {
            "_blocks": codes[..., ::2] | codes[..., 1::2] << 4,
            "_scales": (exponents + 127).to(torch.uint8),
        }
        value = _E2M1[codes.long()] * torch.exp2(exponents).unsqueeze(-1)
        return Packed(tensors, value.flatten(-2))

    config = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    return Scheme(config, pack, experts_only=True)


def _compressed(form: str, **weights: Any) -> Scheme:
    """compressed-tensors in one of its formats; `weights` are its `QuantizationArgs`."""
    arguments = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, format=form)

    def pack(weight_NK: torch.Tensor) -> Packed:
        inputs = weight_NK.shape[1]
        state: dict[str, torch.Tensor] = {"weight": weight_NK.float()}
        group_of_K = torch.arange(inputs) // (arguments.group_size or inputs)
        groups = [weight_NK.float()[:, group_of_K == g] for g in range(int(group_of_K.max()) + 1)]
        low = torch.stack([part.amin(1) for part in groups], 1).clamp(max=0)
        high = torch.stack([part.amax(1) for part in groups], 1).clamp(min=0)
        if arguments.type == "float":
            state["weight_scale"] = torch.maximum(-low, high) / 448
        elif arguments.symmetric:
            state["weight_scale"] = torch.maximum(-low, high) / (
                2 ** (arguments.num_bits - 1) - 0.5
            )
        else:
            step = (high - low) / (2**arguments.num_bits - 1)
            state["weight_scale"] = step
            lowest = -(2 ** (arguments.num_bits - 1))
            state["weight_zero_point"] = (lowest - low / step).round().to(torch.int8)
        compressor = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(state, scheme)
        value = compressor.decompress(stored, scheme)["weight"]
        return Packed({name: tensor.contiguous() for name, tensor in stored.items()}, value)

    section = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    # The library divides in float32 in another order.
    return Scheme(section, pack, atol=1e-6)


SCHEMES: dict[str, Scheme] = {
    "fp8": fp8((128, 128)),
    "fp8-tensor": fp8(None),
    "modelopt-fp8": _modelopt("FP8", fp8(None)),
    "modelopt-blocks": _modelopt("FP8_PB_WO", fp8((128, 128))),
    "mxfp4": mxfp4(),
    "gptq": gptq(128),
    "gptq-channel": gptq(-1),
    "gptq-desc_act": gptq(32, desc_act=True),
    "gptq-zeros": gptq(64, symmetric=False),
    "gptq-v2": gptq(128, symmetric=False, v2=True),
    "gptq-int8": gptq(128, 8),
    "gptq-mixed": _mixed(),
    "awq": _awq(128),
    "awq-32": _awq(32),
    "ct-int4": _compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
    "ct-int4-channel": _compressed("pack-quantized", num_bits=4, strategy="channel"),
    "ct-int4-zeros": _compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=128, symmetric=False
    ),
    "ct-int8": _compressed("pack-quantized", num_bits=8, strategy="group", group_size=128),
    "ct-w8": _compressed("int-quantized", num_bits=8, strategy="channel"),
    "ct-fp8": _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
}


def quantized_copy(
    model: Path, to: Path, scheme: Scheme, dtype: torch.dtype = torch.float32
) -> Path:
    """Quantise a checkpoint's experts and attention; return a copy of it with the same weights in float32.

    Args:
        model: Checkpoint.
        to: New directory, for the quantised copy.
        scheme: The format.
        dtype: Of what is not quantised, and of the activations, in the quantised copy.

    Raises:
        ValueError: The format cannot hold weights of these shapes.
    """
    plain = to.with_name(to.name + "-dequantised")
    stored: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    for shard in sorted(model.glob("*.safetensors")):
        for name, tensor in load_file(shard).items():
            if not _is_quantised(name, scheme):
                floats = tensor.is_floating_point()
                stored[name] = tensor.to(dtype) if floats else tensor
                exact[name] = tensor.float() if floats else tensor
                continue
            # gpt-oss has all experts of a layer in a tensor (E, K, N).
            pack = (scheme.attention or scheme.pack) if ".self_attn." in name else scheme.pack
            packed = pack(tensor.transpose(1, 2) if tensor.dim() == 3 else tensor)
            weight = packed.weight_NK.float()
            exact[name] = (weight.transpose(1, 2) if tensor.dim() == 3 else weight).contiguous()
            module = name.removesuffix(".weight")
            for part, value in packed.tensors.items():
                stored[name + part if part.startswith("_") else f"{module}.{part}"] = value
    config = json.loads((model / "config.json").read_text())
    is_inside = bool(scheme.config) and scheme.file == "config.json"
    section = {"quantization_config": scheme.config} if is_inside else {}
    for path, tensors, change in (
        (to, stored, {"dtype": str(dtype).removeprefix("torch.")} | section),
        (plain, exact, {"dtype": "float32"}),
    ):
        path.mkdir()
        for file in model.iterdir():
            if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
                shutil.copy(file, path)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps(config | change))
    if scheme.file != "config.json":
        (to / scheme.file).write_text(json.dumps(scheme.config))
    return plain


def _is_quantised(name: str, scheme: Scheme) -> bool:
    if ".experts." in name:
        # gpt-oss has all experts of a layer in a tensor.
        return name.endswith((".weight", "_proj") if scheme.experts_only else ".weight")
    return name.endswith("_proj.weight") and not scheme.experts_only
