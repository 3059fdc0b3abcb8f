"""Whole quantised checkpoints: each weight is the dequantised one, or one line says what does not fit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eaas.checkpoint import Checkpoint
from eaas.errors import UnsupportedModelError
from quantized_checkpoint import SCHEMES, Scheme, gptq, quantized_copy

SHARD = "model.safetensors"


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / SHARD)
    change(tensors)
    save_file(tensors, path / SHARD, {"format": "pt"})


def set_section(path: Path, section: dict[str, Any]) -> None:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = section
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "scheme",
    [
        SCHEMES["ct-int4"],
        SCHEMES["fp8"],
        SCHEMES["gptq-mixed"],
        SCHEMES["modelopt-fp8"],
        SCHEMES["modelopt-blocks"],
        Scheme(gptq(32).config, gptq(32).pack, file="quantize_config.json"),
        Scheme(gptq(32).config | {"group_size": 16, "bits": 8}, gptq(32).pack),
        Scheme({"zero_point": True, "w_bit": 4}, SCHEMES["awq-32"].pack, file="quant_config.json"),
    ],
    ids=[
        "compressed-tensors",
        "fp8",
        "dynamic",
        "modelopt",
        "modelopt blocks",
        "autogptq",
        "wrong numbers",
        "autoawq",
    ],
)
def test_every_weight_is_the_dequantised_one(
    checkpoint: Callable[..., Path], tmp_path: Path, scheme: Scheme
) -> None:
    plain = quantized_copy(checkpoint("qwen3_moe"), tmp_path / "copy", scheme)
    expected = load_file(plain / SHARD)
    found = Checkpoint.open(tmp_path / "copy")
    assert found.stored_format is not None
    keys = found.other_keys() | {tensor.key for tensor in found.expert_tensors}
    assert keys == expected.keys()
    for key in keys:
        torch.testing.assert_close(found.slice(key)[...], expected[key], rtol=1e-6, atol=1e-8)


def test_two_experts_that_differ_are_named(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    four, eight = gptq(32), gptq(32, 8)
    source = checkpoint("qwen3_moe")
    for name, scheme in (("four", four), ("eight", eight)):
        quantized_copy(source, tmp_path / name, scheme)
    expert = ".layers.1.mlp.experts.2.up_proj."
    wide = {k: v for k, v in load_file(tmp_path / "eight" / SHARD).items() if expert in k}
    assert wide
    edit(tmp_path / "four", lambda tensors: tensors.update(wide))
    opened = Checkpoint.open(tmp_path / "four")
    with pytest.raises(
        UnsupportedModelError, match=r"experts\.\d+\S* is int4 .*, \S*1\.mlp\S*2\.up_proj.* is int8"
    ) as caught:
        _ = opened.stored_format
    assert "\n" not in str(caught.value)


def test_bits_that_only_the_model_tells_wrong(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Words of a channel with one scale may have 4 bits or 8."""
    quantized_copy(checkpoint("qwen3_moe"), tmp_path / "copy", SCHEMES["ct-int4-channel"])
    section = json.loads(json.dumps(SCHEMES["ct-int4-channel"].config))
    section["config_groups"]["group_0"]["weights"]["num_bits"] = 8
    set_section(tmp_path / "copy", section)
    with pytest.raises(
        UnsupportedModelError, match=r"config\.json: \S+ is \(\d+, \d+\) as int8 .*bits"
    ) as caught:
        Checkpoint.open(tmp_path / "copy")
    assert "download" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "weight"),
    [("head_dim", 4, "self_attn"), ("vocab_size", 100, "embed_tokens|lm_head")],
)
def test_sizes_of_another_version(
    checkpoint: Callable[..., Path], tmp_path: Path, field: str, value: int, weight: str
) -> None:
    path = Path(shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "copy"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(
        UnsupportedModelError,
        match=rf"config\.json: \S*({weight})\S* is \(.*where the model has \(",
    ) as caught:
        Checkpoint.open(path)
    assert "\n" not in str(caught.value)


def test_integers_where_the_model_has_floats(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    quantized_copy(checkpoint("deepseek_v3"), tmp_path / "copy", SCHEMES["gptq-channel"])
    name = next(key for key in load_file(tmp_path / "copy" / SHARD) if key.endswith("_bias"))
    edit(tmp_path / "copy", lambda tensors: tensors.update({name: tensors[name].to(torch.int32)}))
    with pytest.raises(UnsupportedModelError, match=rf"{SHARD}: tensor {name} is I32 where"):
        Checkpoint.open(tmp_path / "copy")
