"""Each format is read as its own tool wrote it, and what does not fit is refused in one line."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.quality.quantized_checkpoint import SCHEMES, Packed, Scheme
from eaas.checkpoint.files import read_files
from eaas.checkpoint.quantized_slice import QuantizedSlice
from eaas.checkpoint.shard import LocalShard
from eaas.errors import CorruptShardError, UnsupportedModelError

ROWS, INPUTS = 96, 384


def weight(rows: int = ROWS, inputs: int = INPUTS) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(0)) * 0.02


def write(path: Path, scheme: Scheme, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    config = {"model_type": "qwen3_moe", "quantization_config": scheme.config}
    (path / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors"
    )
    return path


def stored(packed: Packed, module: str = "m") -> dict[str, torch.Tensor]:
    """Names as a checkpoint has them."""
    return {
        module + part if part.startswith("_") else f"{module}.{part}": tensor
        for part, tensor in packed.tensors.items()
    }


def opened(path: Path, name: str = "m.weight") -> QuantizedSlice:
    files = read_files(path)
    (shard,) = files.headers
    matrix = files.matrices[name]
    open_shard = LocalShard(path / shard, files.headers[shard])
    parts = {part: open_shard.slice(key) for part, key in matrix.parts.items()}
    return QuantizedSlice(matrix, parts, matrix.shape)


@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "mxfp4"])
def test_a_matrix_is_what_its_tool_wrote(tmp_path: Path, name: str) -> None:
    scheme = SCHEMES[name]
    packed = scheme.pack(weight())
    found = opened(write(tmp_path, scheme, stored(packed)))
    assert found.shape == (ROWS, INPUTS)
    torch.testing.assert_close(found[...], packed.weight_NK, rtol=0, atol=scheme.atol)
    torch.testing.assert_close(found[3:9], packed.weight_NK[3:9], rtol=0, atol=scheme.atol)


def test_mxfp4_of_each_expert(tmp_path: Path) -> None:
    scheme = SCHEMES["mxfp4"]
    packed = scheme.pack(torch.stack([weight(), weight() * 7]))
    found = opened(write(tmp_path, scheme, stored(packed)), "m")
    assert found.shape == (2, ROWS, INPUTS)
    assert torch.equal(found[...], packed.weight_NK)
    assert torch.equal(found.row(1)[...], packed.weight_NK[1])


@pytest.mark.parametrize("group", [16, 31, 32, 48])
def test_a_short_last_group(tmp_path: Path, group: int) -> None:
    """compressed-tensors refuses them; GPTQ does not."""
    from benchmarks.quality.quantized_checkpoint import gptq

    scheme = gptq(group, symmetric=False)
    packed = scheme.pack(weight(inputs=104))
    found = opened(write(tmp_path, scheme, stored(packed)))
    assert torch.equal(found[...], packed.weight_NK)


@pytest.mark.parametrize("name", ["fp8", "gptq", "awq", "ct-int4", "ct-fp8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_damaged_scale_is_refused(tmp_path: Path, name: str, value: float) -> None:
    tensors = stored(SCHEMES[name].pack(weight()))
    (scale,) = (key for key in tensors if "scale" in key)
    tensors[scale].view(-1)[-1] = value
    with pytest.raises(CorruptShardError, match=r"tensor m\..*scale is NaN or infinite") as caught:
        opened(write(tmp_path, SCHEMES[name], tensors))[...]
    assert "\n" not in str(caught.value)


def test_damaged_codes_and_exponents_are_refused(tmp_path: Path) -> None:
    tensors = stored(SCHEMES["fp8"].pack(weight()))
    tensors["m.weight"].view(torch.uint8)[2, 7] = 0xFF
    with pytest.raises(CorruptShardError, match="a weight is NaN"):
        opened(write(tmp_path / "fp8", SCHEMES["fp8"], tensors))[...]
    tensors = stored(SCHEMES["mxfp4"].pack(weight()))
    tensors["m_scales"][1, 1] = 255
    with pytest.raises(CorruptShardError, match="a scale is NaN"):
        opened(write(tmp_path / "mxfp4", SCHEMES["mxfp4"], tensors), "m")[...]


@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "mxfp4"])
def test_scales_of_another_matrix_are_refused(tmp_path: Path, name: str) -> None:
    scheme = SCHEMES[name]
    tensors, others = (stored(scheme.pack(weight(rows, 640))) for rows in (96, 256))
    for key in tensors:
        if "scale" in key:
            tensors[key] = others[key] if tensors[key].dim() else torch.ones(3)
    with pytest.raises((CorruptShardError, UnsupportedModelError)) as caught:
        opened(write(tmp_path, scheme, tensors))[...]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("fp8", {"fmt": "e5m2"}, "e5m2"),
        ("gptq", {"bits": 3}, "3 bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "marlin"),
        ("gptq", {"bits": None}, "gptq"),
        ("gptq", {"bits": "four"}, "gptq"),
        ("awq", {"version": "gemv"}, "gemv"),
        ("ct-int4", {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ("ct-int4", {"sparsity_config": {"format": "dense"}}, "sparsity_config"),
        ("fp8", {"quant_method": "bitsandbytes"}, "'bitsandbytes', which is not supported"),
    ],
)
def test_unknown_variants_are_refused(
    tmp_path: Path, name: str, change: dict[str, object], words: str
) -> None:
    scheme = Scheme(SCHEMES[name].config | change, SCHEMES[name].pack)
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        read_files(write(tmp_path, scheme, stored(SCHEMES[name].pack(weight()))))
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_missing_part_is_refused(tmp_path: Path, name: str) -> None:
    tensors = stored(SCHEMES[name].pack(weight()))
    (scale,) = (key for key in tensors if "scale" in key)
    del tensors[scale]
    with pytest.raises(UnsupportedModelError, match="m"):
        read_files(write(tmp_path, SCHEMES[name], tensors))


def test_the_scheme_of_a_module_is_the_one_that_names_it(tmp_path: Path) -> None:
    scheme = SCHEMES["ct-int4"]
    groups = json.loads(json.dumps(scheme.config["config_groups"]))
    groups["group_1"] = SCHEMES["ct-int8"].config["config_groups"]["group_0"] | {
        "targets": ["re:.*experts.*"]
    }
    both = Scheme(scheme.config | {"config_groups": groups}, scheme.pack)
    four, eight = scheme.pack(weight()), SCHEMES["ct-int8"].pack(weight())
    path = write(tmp_path, both, stored(four, "attention") | stored(eight, "experts.3.up"))
    for name, packed in (("attention", four), ("experts.3.up", eight)):
        found = opened(path, f"{name}.weight")[...]
        torch.testing.assert_close(found, packed.weight_NK, rtol=0, atol=1e-6)
