"""Each format is read as its own tool wrote it, and what does not fit is refused in one line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eaas.checkpoint.files import read_files
from eaas.checkpoint.quantized_slice import QuantizedSlice
from eaas.checkpoint.shard import LocalShard
from eaas.errors import CheckpointError, CorruptShardError, UnsupportedModelError
from quantized_checkpoint import SCHEMES, Packed, Scheme, gptq

ROWS, INPUTS = 96, 384


def weight(rows: int = ROWS, inputs: int = INPUTS) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(0)) * 0.02


def write(path: Path, scheme: Scheme, tensors: dict[str, torch.Tensor]) -> Path:
    path.mkdir(exist_ok=True)
    is_inside = scheme.file == "config.json"
    section = {"quantization_config": scheme.config} if is_inside else {}
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"} | section))
    if not is_inside:
        (path / scheme.file).write_text(json.dumps(scheme.config))
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


def changed(name: str, **fields: object) -> Scheme:
    """A scheme whose section states other things."""
    return replace(SCHEMES[name], config=SCHEMES[name].config | fields)


def of_group(**weights: object) -> dict[str, Any]:
    """Fields of compressed-tensors with other arguments of the weights; drops those that are None."""
    (group,) = json.loads(json.dumps(SCHEMES["ct-int4"].config["config_groups"])).values()
    group["weights"] = {k: v for k, v in (group["weights"] | weights).items() if v is not None}
    return {"config_groups": {"group_0": group}}


def transforms(*locations: str | None) -> dict[str, object]:
    """Fields of compressed-tensors with transforms in these places."""
    steps = [{"location": location, "targets": ["Linear"]} for location in locations]
    return {"transform_config": {"config_groups": {"u": {"type": "hadamard", "apply": steps}}}}


def of_modelopt(algorithm: str) -> list[dict[str, object]]:
    """Fields of ModelOpt that name an algorithm for all layers, and for one of them."""
    layers = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": algorithm}}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    return [{"quantization": {"quant_algo": algorithm}}, {"quantization": mixed}]


INVALID_TARGET = of_group()
INVALID_TARGET["config_groups"]["group_0"]["targets"] = ["re:*["]


def test_mxfp4_of_each_expert(tmp_path: Path) -> None:
    scheme = SCHEMES["mxfp4"]
    packed = scheme.pack(torch.stack([weight(), weight() * 7]))
    found = opened(write(tmp_path, scheme, stored(packed)), "m")
    assert found.shape == (2, ROWS, INPUTS)
    assert torch.equal(found[...], packed.weight_NK)
    assert torch.equal(found.row(1)[...], packed.weight_NK[1])


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "part", "value", "words"),
    [
        *(
            (name, "scale", value, r"tensor m\..*scale is NaN or infinite")
            for name in ("fp8", "gptq", "awq", "ct-int4", "ct-fp8")
            for value in (NAN, INFINITE)
        ),
        ("fp8", "m.weight", 0xFF, "a weight is NaN"),
        ("mxfp4", "m_scales", 255, "a scale is NaN"),
    ],
)
def test_a_damaged_code_or_scale_is_refused(
    tmp_path: Path, name: str, part: str, value: float, words: str
) -> None:
    tensors = stored(SCHEMES[name].pack(weight()))
    (key,) = (key for key in tensors if part in key and (part == "scale" or part == key))
    tensor = tensors[key].view(torch.uint8) if isinstance(value, int) else tensors[key]
    tensor.view(-1)[-1] = value
    opened_as = "m" if name == "mxfp4" else "m.weight"
    with pytest.raises(CorruptShardError, match=words) as caught:
        opened(write(tmp_path, SCHEMES[name], tensors), opened_as)[...]
    assert "\n" not in str(caught.value)


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
        ("fp8", {"weight_block_size": [64, 64]}, r"blocks of \(64, 64\)"),
        ("fp8", {"weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\], not two"),
        ("fp8", {"weight_block_size": [-128, 128]}, "weight_block_size is .*, not two sizes"),
        ("fp8", {"weight_block_size": [float("inf"), 128]}, "weight_block_size is inf, not an"),
        ("fp8", {"weight_block_size": [float("nan"), 128]}, "weight_block_size is nan, not an"),
        ("fp8", {"weight_block_size": 128}, "weight_block_size is 128, not two sizes"),
        ("fp8", {"weight_block_size": "abc"}, "weight_block_size is 'abc', not two sizes"),
        ("gptq", {"group_size": float("inf")}, "group_size is inf, not an integer"),
        ("gptq", {"group_size": 10**400}, "group_size is 10+, not an integer"),
        ("gptq", {"bits": float("-inf")}, "bits is -inf, not an integer"),
        ("awq", {"group_size": float("nan")}, "group_size is nan, not an integer"),
        ("awq", {"group_size": 64.5}, r"group_size is 64\.5, not an integer"),
        ("gptq", {"checkpoint_format": "marlin"}, "marlin"),
        ("gptq", {"checkpoint_format": None, "is_marlin_format": True}, "marlin"),
        ("gptq", {"format": "gptq_v2"}, "checkpoint_format 'gptq', format 'gptq_v2'"),
        ("gptq", {"adapter": {"name": "lora", "rank": 8}}, "adapter"),
        ("gptq", {"bits": "four"}, "bits is 'four'"),
        ("gptq", {"dynamic": {"+:*[": {"bits": 8}}}, r"dynamic has an invalid .*\*\["),
        ("gptq", {"dynamic": "x"}, r"gptq has another form here \(AttributeError: "),
        ("awq", {"version": "gemv"}, "gemv"),
        ("awq", {"version": None, "format": "gemv_fast"}, "gemv_fast"),
        ("awq", {"version": None, "backend": "llm-awq"}, "llm-awq"),
        ("ct-int4", {"format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ("ct-int4", {"sparsity_config": {"format": "dense"}}, "sparsity_config"),
        ("ct-int4", {"ignore": ["re:*["]}, r"ignore has an invalid .*\*\["),
        ("fp8", {"quant_method": "bitsandbytes"}, "'bitsandbytes', which is not supported"),
        ("fp8", {"quant_method": None}, "no quant_method"),
        ("ct-int4", of_group(group_size=float("inf")), "group_size is inf, not an integer"),
        ("ct-int4", of_group(block_structure=[0, 0]), r"is \[0, 0\], not two sizes"),
        ("ct-int4", of_group(block_structure="128"), "block_structure is '128', not two sizes"),
        ("ct-int4", of_group(num_bits=float("nan")), "num_bits is nan, not an integer"),
        ("ct-int4", INVALID_TARGET, r"targets has an invalid .*\*\["),
        *(
            ("ct-int4", transforms("weight_input", place), rf"transform_config .* the {place} of")
            for place in ("input", "output", "k_cache", None)
        ),
        *(
            ("modelopt-fp8", fields, rf"'{algorithm}'")
            for algorithm in ("NVFP4", "W4A16_AWQ", "MXFP8")
            for fields in of_modelopt(algorithm)
        ),
    ],
)
def test_unknown_variants_are_refused(
    tmp_path: Path, name: str, change: dict[str, object], words: str
) -> None:
    scheme = changed(name, **change)
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        read_files(write(tmp_path, scheme, stored(scheme.pack(weight()))))
    assert str(tmp_path / scheme.file) in str(caught.value)
    assert "\n" not in str(caught.value)


SCALE = "the scale"


@pytest.mark.parametrize(
    ("name", "missing", "fields"),
    [
        *((name, SCALE, {}) for name in SCHEMES),
        # Parts without which codes have other values.
        ("gptq-desc_act", "m.g_idx", {}),
        ("ct-int4", "m.weight_g_idx", of_group(actorder="group")),
        ("ct-int4-zeros", "m.weight_zero_point", {}),
    ],
)
def test_a_missing_part_is_refused(
    tmp_path: Path, name: str, missing: str, fields: dict[str, object]
) -> None:
    tensors = stored(SCHEMES[name].pack(weight()))
    if missing == SCALE:
        (scale,) = (key for key in tensors if "scale" in key and "input" not in key)
        del tensors[scale]
    else:
        tensors.pop(missing, None)
    with pytest.raises(
        UnsupportedModelError, match="m" if missing == SCALE else f"has no {missing}"
    ):
        read_files(write(tmp_path, changed(name, **fields), tensors))


MISLEADING: list[tuple[str, dict[str, Any]]] = [
    ("gptq", {"bits": 8, "group_size": 32}),
    ("gptq", {"bits": 3}),
    ("gptq", {"bits": None, "group_size": None}),
    ("gptq-int8", {"bits": 4}),
    ("gptq-channel", {"group_size": 128}),
    ("gptq", {"dynamic": {"m": {"bits": 8}}}),
    ("gptq", {"dynamic": {"-:m": {}}}),
    ("gptq-zeros", {"sym": True}),
    ("gptq-desc_act", {"desc_act": False}),
    ("gptq-v2", {"checkpoint_format": None, "format": "GPTQ_V2"}),
    ("awq-32", {"group_size": None}),
    ("awq", {"bits": 8}),
    ("fp8", {"scale_fmt": "ue8m0"}),
    ("fp8", {"fmt": "float8_e4m3fn"}),  # MiniMax
    ("fp8", {"quant_method": "FP8"}),
    ("gptq", {"quant_method": "GPTQ"}),
    ("ct-int4", of_group(num_bits=8)),
    ("ct-int4", of_group(group_size=128)),
    ("ct-int4", of_group(group_size=None)),
    ("ct-fp8", transforms("weight_output")),
]
"""What a section states wrongly, or not at all."""


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


@pytest.mark.parametrize(
    ("scheme", "inputs"),
    [
        *((SCHEMES[name], INPUTS) for name in SCHEMES if name != "mxfp4"),
        *((changed(name, **fields), INPUTS) for name, fields in MISLEADING),
        # Blocks of 128 where a section names none.
        (replace(SCHEMES["fp8"], config={"quant_method": "fp8"}), INPUTS),
        # A short last group: compressed-tensors refuses them; GPTQ does not.
        *((gptq(group, symmetric=False), 104) for group in (16, 31, 32, 48)),
    ],
)
def test_a_matrix_is_what_its_tool_wrote(tmp_path: Path, scheme: Scheme, inputs: int) -> None:
    """The tensors decide, not what the section says of them."""
    packed = scheme.pack(weight(inputs=inputs))
    found, wanted_NK = opened(write(tmp_path, scheme, stored(packed))), packed.weight_NK.float()
    assert found.shape == (ROWS, inputs)
    torch.testing.assert_close(found[...], wanted_NK, rtol=0, atol=scheme.atol)
    torch.testing.assert_close(found[3:9], wanted_NK[3:9], rtol=0, atol=scheme.atol)


@pytest.mark.parametrize(("sym", "has_zeros"), [(True, False), (False, True), (None, True)])
def test_zero_points_of_gptq(tmp_path: Path, sym: bool | None, has_zeros: bool) -> None:
    """They are in each file. Kernels leave out those that the section says to be the middle."""
    scheme = changed("gptq-int8", sym=sym)
    found = opened(write(tmp_path, scheme, stored(scheme.pack(weight()))))
    assert found.matrix.stored.has_zeros is has_zeros


def test_three_bits_are_refused_with_the_rule(tmp_path: Path) -> None:
    tensors = {
        "m.qweight": torch.zeros(INPUTS * 3 // 32, ROWS, dtype=torch.int32),
        "m.qzeros": torch.zeros(3, ROWS * 3 // 32, dtype=torch.int32),
        "m.scales": torch.ones(3, ROWS),
    }
    scheme = changed("gptq", dynamic={"+:m$": {"bits": 3}})
    with pytest.raises(UnsupportedModelError, match=r"3 bits .*m\.qweight, by rule '\+:m\$'"):
        read_files(write(tmp_path, scheme, tensors))


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("gptq-desc_act", "quantize_config.json"),
        ("awq-32", "quant_config.json"),
        ("modelopt-fp8", "hf_quant_config.json"),
        ("modelopt-blocks", "config.json"),
    ],
)
@pytest.mark.parametrize("empty", [None, {}])
def test_a_section_in_another_file(
    tmp_path: Path, name: str, file: str, empty: dict[str, object] | None
) -> None:
    """As old releases write it, without quant_method."""
    old = {"bits": "w_bit", "group_size": "q_group_size"} if name.startswith("awq") else {}
    section = {
        old.get(key, key): value
        for key, value in SCHEMES[name].config.items()
        if key not in ("quant_method", "checkpoint_format")
    }
    packed = SCHEMES[name].pack(weight())
    path = write(tmp_path, Scheme(section, SCHEMES[name].pack, file=file), stored(packed))
    if file != "config.json":
        config = {"model_type": "qwen3_moe", "quantization_config": empty}
        (path / "config.json").write_text(json.dumps(config))
    assert torch.equal(opened(path)[...], packed.weight_NK.float())


def test_config_json_comes_before_other_files(tmp_path: Path) -> None:
    packed = SCHEMES["gptq-v2"].pack(weight())
    path = write(tmp_path, SCHEMES["gptq-v2"], stored(packed))
    (path / "quantize_config.json").write_text(json.dumps(SCHEMES["gptq"].config))
    (path / "quant_config.json").write_text("[")
    assert torch.equal(opened(path)[...], packed.weight_NK)
    # A digest has the section of another file.
    digests = set()
    for section in (SCHEMES["gptq"].config, SCHEMES["gptq-v2"].config):
        scheme = Scheme(dict(section), SCHEMES["gptq"].pack, file="quantize_config.json")
        digests.add(read_files(write(tmp_path / "other", scheme, stored(packed))).digest(()))
    assert len(digests) == 2


@pytest.mark.parametrize("text", ["{}", "null", " null\n"])
def test_an_empty_side_file_hides_no_other(tmp_path: Path, text: str) -> None:
    scheme = Scheme(SCHEMES["awq-32"].config, SCHEMES["awq-32"].pack, file="quant_config.json")
    packed = scheme.pack(weight())
    path = write(tmp_path, scheme, stored(packed))
    for other in ("hf_quant_config.json", "quantize_config.json"):
        (path / other).write_text(text)
    assert torch.equal(opened(path)[...], packed.weight_NK)
    (path / scheme.file).write_text(text)
    with pytest.raises(UnsupportedModelError, match=r"neither config\.json"):
        read_files(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[3]", "holds a list instead"),
        ('{"quant_method": 3}', "with 3"),
    ],
)
def test_another_file_that_cannot_be_read(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, Scheme({}, SCHEMES["awq"].pack), stored(SCHEMES["awq"].pack(weight())))
    (path / "quant_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"quant_config\.json.* {words}") as caught:
        read_files(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("section", [None, {}, "fp8", ["fp8"], 4])
def test_quantised_tensors_without_a_section_are_refused(
    tmp_path: Path, name: str, section: object
) -> None:
    path = write(tmp_path, Scheme({}, SCHEMES[name].pack), stored(SCHEMES[name].pack(weight())))
    config = {"model_type": "qwen3_moe", "quantization_config": section}
    (path / "config.json").write_text(json.dumps(config))
    words, file = r"tensor m\S* \(\w+\) belongs to", "model.safetensors"
    if section:
        words, file = "quantization_config is .* where a mapping", "config.json"
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        read_files(path)
    assert str(path / file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("m.weight", torch.zeros(4, 8, dtype=torch.uint32)),  # MLX
        ("m.weight", torch.zeros(8, 1, dtype=torch.uint8)),  # bitsandbytes
        ("m.W_q", torch.zeros(8, 8, dtype=torch.uint8)),  # HQQ
        ("m.weight._data", torch.zeros(8, 8, dtype=torch.int8)),  # quanto
        ("m.pre_quant_scale", torch.ones(8)),
        ("n.weight_scale", torch.ones(1)),
    ],
)
@pytest.mark.parametrize("is_described", [False, True])
def test_a_tensor_that_the_format_does_not_read(
    tmp_path: Path, name: str, tensor: torch.Tensor, is_described: bool
) -> None:
    scheme = SCHEMES["fp8"] if is_described else Scheme({}, SCHEMES["fp8"].pack)
    path = write(tmp_path, scheme, {"n.weight": weight(), name: tensor})
    with pytest.raises(UnsupportedModelError, match=rf"tensor {name} \(") as caught:
        read_files(path)
    assert ("fp8 of config.json" in str(caught.value)) == is_described


def test_tensors_that_only_look_quantised(tmp_path: Path) -> None:
    """Tables, masks, learnt factors, and scales of a cache that is not quantised here."""
    tensors = {
        "a.weight": weight(),
        "a.bias": torch.zeros(1, 1, 8, 8, dtype=torch.uint8),
        "a.k_scale": torch.ones(1),
        "a.per_dim_scale": torch.ones(8),
        "router.per_expert_scale": torch.ones(4),
        "position_ids": torch.zeros(1, 8, dtype=torch.int64),
        "gate.tid2eid": torch.zeros(8, 2, dtype=torch.int32),
    }
    path = write(tmp_path, Scheme({}, SCHEMES["fp8"].pack), tensors)
    # A file that was left beside weights that are not quantised.
    (path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert not read_files(path).matrices
