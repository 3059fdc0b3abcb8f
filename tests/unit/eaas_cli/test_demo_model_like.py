"""Checkpoints like published ones: published names, shapes and codes, which transformers loads."""

import json
import resource
import tracemalloc
import warnings
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
)
from typer.testing import CliRunner

from eaas.checkpoint import Checkpoint, quiet_transformers
from eaas.checkpoint.formats import StoredFormat
from eaas.checkpoint.header import read_header
from eaas.checkpoint.local import LocalSource
from eaas.checkpoint.quantized import FP8, INT4, MXFP4, QuantizedMatrix
from eaas.errors import ConfigError
from eaas_cli.commands import app
from eaas_cli.demo_model import write_model_like
from eaas_cli.demo_model.layout import Draw, TensorPlan, plan_tensors
from eaas_cli.demo_model.random_tensors import draw_tensor
from eaas_cli.demo_model.write import PUBLISHED, published_config, write_checkpoint

# Each side of a matrix is shorter than an FP8 block or a multiple of it. transformers takes the size of a
# block from the number of scales, so it misreads others, and refuses DeepSeek-V3's 576 rows with 5 scales.
SMALL: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
    },
    "qwen3_moe": {
        "hidden_size": 256,
        "moe_intermediate_size": 96,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "mixtral": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "deepseek_v3": {
        "hidden_size": 256,
        "intermediate_size": 384,
        "moe_intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 48,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
    },
}


def small(name: str) -> dict[str, Any]:
    """A published config with small layers, two of them with experts."""
    config = published_config(name, PUBLISHED[name].get("first_k_dense_replace", 0) + 2)
    return config | SMALL[config["model_type"]] | {"vocab_size": 3000}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write a small checkpoint like a published one, once."""

    @cache
    def write(name: str) -> Path:
        path = tmp_path_factory.mktemp("like") / name
        write_checkpoint(path, small(name), {}, seed=0, max_shard_bytes=1_000_000)
        return path

    return write


@pytest.fixture(scope="module")
def loaded(written: Callable[[str], Path]) -> Callable[[str], tuple[Any, Any]]:
    """Load it with transformers, once."""
    return cache(lambda name: load(written(name)))


def entries(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each tensor, by the index."""
    weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    of_shard = {shard: read_header(LocalSource(path), shard) for shard in set(weight_map.values())}
    assert sorted(of_shard) == sorted(file.name for file in path.glob("*.safetensors"))
    assert {name for header in of_shard.values() for name in header.tensors} == set(weight_map)
    tensors = {name: of_shard[shard].tensors[name] for name, shard in weight_map.items()}
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def read(path: Path, name: str) -> torch.Tensor:
    weight_map = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(path / weight_map[name], framework="pt") as shard:
        return shard.get_tensor(name)


def load(path: Path) -> tuple[Any, dict[str, Collection[Any]]]:
    """Load a checkpoint dequantised, as float32, with transformers' report."""
    config = json.loads((path / "config.json").read_text())
    readers: dict[str, Any] = {
        "mxfp4": Mxfp4Config,
        "fp8": FineGrainedFP8Config,
        "compressed-tensors": CompressedTensorsConfig,
    }
    reader = readers.get(config.get("quantization_config", {}).get("quant_method"))
    quantization = {} if reader is None else {"quantization_config": reader(dequantize=True)}
    with quiet_transformers(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You passed `quantization_config`")
        model, report = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.bfloat16,
            experts_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
            **quantization,
        )
    return model.float().eval(), report


# The sizes that the published indexes state, in bytes.
@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("gpt-oss-20b", 13_761_264_768),
        ("gpt-oss-120b", 65_248_815_744),
        ("Qwen3-30B-A3B", 61_064_245_248),
        ("Mixtral-8x7B", 93_405_585_408),
    ],
)
def test_a_whole_model_has_the_published_size(name: str, total: int) -> None:
    assert sum(plan.nbytes for plan in plan_tensors(published_config(name))) == total


@pytest.mark.parametrize("name", PUBLISHED)
def test_checkpoint_names_are_those_that_transformers_reads(name: str, tmp_path: Path) -> None:
    """Without the quantisation, which `Checkpoint.open` may refuse: the same names else."""
    config = small(name)
    config.pop("quantization_config", None)
    write_checkpoint(tmp_path / "x", config, {}, seed=0, max_shard_bytes=1_000_000)
    checkpoint = Checkpoint.open(tmp_path / "x")
    assert checkpoint.expert_keys() | checkpoint.other_keys() == set(checkpoint.keys)
    assert checkpoint.shape.dtype == "bfloat16"
    assert checkpoint.shape.num_layers == 2
    report = load(tmp_path / "x")[1]
    assert not any(report.values()), report


# Of each code that is drawn by its own rule, one; `make test-nightly` takes the others, too.
USUAL = ("gpt-oss-20b", "Mixtral-8x7B", "Qwen3-30B-A3B-FP8")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name not in USUAL)) for name in PUBLISHED],
)
def test_transformers_loads_it_and_answers_vary(
    name: str, written: Callable[[str], Path], loaded: Callable[[str], tuple[Any, Any]]
) -> None:
    if name == "Kimi-K2-Thinking":
        pytest.importorskip("compressed_tensors")
    model, report = loaded(name)
    assert not any(report.values()), report
    tokenizer = AutoTokenizer.from_pretrained(written(name), local_files_only=True)
    answers = []
    for question in ("Hello there", "The river begins", "ünïcode ✓"):
        prompt_1T = tokenizer(question, return_tensors="pt").input_ids
        out = model.generate(
            prompt_1T,
            attention_mask=torch.ones_like(prompt_1T),
            max_new_tokens=16,
            output_logits=True,
            return_dict_in_generate=True,
        )
        answer = out.sequences[0, prompt_1T.shape[1] :].tolist()
        assert torch.cat(out.logits).isfinite().all()
        assert len(answer) == 16
        assert len(set(answer)) >= 6
        assert all(tokenizer.decode([token]).strip().isalpha() for token in answer)
        answers.append(tuple(answer))
    assert len(set(answers)) == 3
    for key, weight in model.state_dict().items():
        if weight.dim() >= 2 and ".layers." in key:
            is_transposed = "gpt_oss" in model.config.model_type and key.endswith("_proj")
            inputs = weight.shape[-2] if is_transposed else weight.shape[-1]
            assert 0.15 < float(weight.square().mean().sqrt()) * inputs**0.5 < 1.5, key
            assert 0.002 < float(weight.square().mean().sqrt()) < 0.2, key


def test_mxfp4_is_stored_as_published(
    written: Callable[[str], Path], loaded: Callable[[str], tuple[Any, Any]]
) -> None:
    path = written("gpt-oss-20b")
    found = entries(path)
    expert = "model.layers.1.mlp.experts"
    assert {name: found[name] for name in found if name.startswith("model.layers.1.mlp.")} == {
        f"{expert}.gate_up_proj_blocks": ("U8", (8, 192, 2, 16)),
        f"{expert}.gate_up_proj_scales": ("U8", (8, 192, 2)),
        f"{expert}.gate_up_proj_bias": ("BF16", (8, 192)),
        f"{expert}.down_proj_blocks": ("U8", (8, 64, 3, 16)),
        f"{expert}.down_proj_scales": ("U8", (8, 64, 3)),
        f"{expert}.down_proj_bias": ("BF16", (8, 64)),
        "model.layers.1.mlp.router.weight": ("BF16", (8, 64)),
        "model.layers.1.mlp.router.bias": ("BF16", (8,)),
    }
    assert found["model.layers.1.self_attn.sinks"] == ("BF16", (4,))
    assert found["model.layers.1.self_attn.q_proj.bias"] == ("BF16", (128,))
    scales = read(path, f"{expert}.down_proj_scales")[3]
    matrix = QuantizedMatrix(
        MXFP4, 96, 32, read(path, f"{expert}.down_proj_blocks")[3].flatten(1), scales
    )
    assert len(scales.unique()) == 2
    assert len(matrix.codes.unique()) == 256
    theirs = loaded("gpt-oss-20b")[0].state_dict()[f"{expert}.down_proj"][3]
    assert torch.equal(matrix.dequantize(), theirs.T)


@pytest.mark.parametrize(
    ("name", "scale"), [("Qwen3-30B-A3B-FP8", "BF16"), ("DeepSeek-V3", "F32"), ("Kimi-K2", "F32")]
)
def test_fp8_is_stored_as_published(
    written: Callable[[str], Path],
    loaded: Callable[[str], tuple[Any, Any]],
    name: str,
    scale: str,
) -> None:
    path = written(name)
    found = entries(path)
    layer = f"model.layers.{small(name)['num_hidden_layers'] - 1}"
    expert = f"{layer}.mlp.experts.1.down_proj.weight"
    assert found[expert] == ("F8_E4M3", (256, 96))
    assert found[f"{expert}_scale_inv"] == (scale, (2, 1))
    assert found[f"{layer}.self_attn.o_proj.weight"][0] == "F8_E4M3"
    scaled = {name.removesuffix("_scale_inv") for name in found if name.endswith("_scale_inv")}
    assert scaled == {name for name, (dtype, _) in found.items() if dtype == "F8_E4M3"}
    others = {name: dtype for name, (dtype, _) in found.items() if "scale_inv" not in name}
    assert {name for name, dtype in others.items() if dtype == "F32"} == {
        name for name in found if name.endswith("e_score_correction_bias")
    }
    for kept in (f"{layer}.mlp.gate.weight", "lm_head.weight", f"{layer}.input_layernorm.weight"):
        assert found[kept][0] == "BF16"

    scales = read(path, f"{expert}_scale_inv").float().repeat_interleave(128, 0)
    codes = read(path, expert).view(torch.uint8)
    matrix = QuantizedMatrix(FP8, 96, 128, codes, scales)
    matrix.check(expert)
    theirs = loaded(name)[0].state_dict()[f"{layer}.mlp.experts.down_proj"][1]
    torch.testing.assert_close(matrix.dequantize(), theirs, rtol=2**-7, atol=0)


def test_pack_quantized_is_stored_as_published(
    written: Callable[[str], Path], loaded: Callable[[str], tuple[Any, Any]]
) -> None:
    path = written("Kimi-K2-Thinking")
    found = entries(path)
    experts = "model.layers.2.mlp.experts"
    expert = f"{experts}.1.down_proj.weight"
    assert expert not in found
    assert found[f"{expert}_packed"] == ("I32", (256, 12))
    assert found[f"{expert}_scale"] == ("BF16", (256, 3))
    assert found[f"{expert}_shape"] == ("I64", (2,))
    assert read(path, f"{expert}_shape").tolist() == [256, 96]
    stored = Checkpoint.open(path).stored_format
    assert stored == StoredFormat(INT4, 32, has_short_scales=True)
    packed = {name for name in found if name.endswith("_packed")}
    assert len(packed) == 2 * 16 * 3
    assert all(".mlp.experts." in name for name in packed)
    codes = read(path, f"{expert}_packed").view(torch.uint8)
    scales = read(path, f"{expert}_scale").float()
    matrix = QuantizedMatrix(INT4, 96, 32, codes, scales)
    size = float(matrix.dequantize().square().mean().sqrt()) * 96**0.5 * 2.827
    assert size == pytest.approx(1, abs=0.05)
    pytest.importorskip("compressed_tensors")
    theirs = loaded("Kimi-K2-Thinking")[0].state_dict()[f"{experts}.down_proj"][1]
    torch.testing.assert_close(matrix.dequantize(), theirs, rtol=2**-7, atol=0)


def test_same_seed_same_bytes_and_shards_do_not_matter(tmp_path: Path) -> None:
    config = small("Kimi-K2-Thinking")
    write_checkpoint(tmp_path / "a", config, {}, seed=5)
    write_checkpoint(tmp_path / "b", config, {}, seed=5, max_shard_bytes=500_000)
    write_checkpoint(tmp_path / "c", config, {}, seed=6)
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 1
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 3
    differ = set()
    for name in entries(tmp_path / "a"):
        first = read(tmp_path / "a", name)
        assert torch.equal(first, read(tmp_path / "b", name)), name
        if not torch.equal(first, read(tmp_path / "c", name)):
            differ.add(name)
    assert {name for name in differ if name.endswith(("norm.weight", "_shape"))} == set()
    assert len(differ) > 0.5 * len(entries(tmp_path / "a"))


def test_fewer_layers_are_the_first_ones(tmp_path: Path) -> None:
    config, calls = small("gpt-oss-20b"), list[tuple[int, int]]()
    write_checkpoint(
        tmp_path / "two", config, {}, seed=0, progress=lambda *wrote: calls.append(wrote)
    )
    fewer = config | {"num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}
    write_checkpoint(tmp_path / "one", fewer, {}, seed=0)
    for name in entries(tmp_path / "one"):
        assert torch.equal(read(tmp_path / "one", name), read(tmp_path / "two", name)), name
    # The progress adds up to all bytes.
    index = json.loads((tmp_path / "two" / "model.safetensors.index.json").read_text())
    assert {total for _, total in calls} == {index["metadata"]["total_size"]}
    assert sum(wrote for wrote, _ in calls) == index["metadata"]["total_size"]


def test_deepseek_v3_has_small_last_blocks_and_a_layer_that_predicts_a_further_token() -> None:
    whole, part = published_config("DeepSeek-V3"), published_config("DeepSeek-V3", 5)
    assert (whole["num_nextn_predict_layers"], part["num_nextn_predict_layers"]) == (1, 0)
    plans = {plan.name: plan for plan in plan_tensors(whole)}
    assert len(plans) == 91_991, "the published number"
    assert "model.layers.61.eh_proj.weight" in plans
    assert not any("layers.5." in plan.name for plan in plan_tensors(part))
    name = "model.layers.3.self_attn.kv_a_proj_with_mqa.weight"
    assert (plans[name].shape, plans[f"{name}_scale_inv"].shape) == ((576, 7168), (5, 56))


@pytest.mark.parametrize("draw", [Draw.NORMAL, Draw.E4M3, Draw.E2M1, Draw.EMBEDDING, Draw.OUTPUT])
def test_memory_holds_no_whole_tensor(draw: Draw) -> None:
    dtype = {Draw.E4M3: "F8_E4M3", Draw.E2M1: "U8"}.get(draw, "BF16")
    plan = TensorPlan("x", dtype, (100_000, 640), draw, embedding="y")
    next(iter(draw_tensor(plan, 0, range(10, 100))))  # makes the tables
    tracemalloc.start()
    try:
        assert sum(piece.nbytes for piece in draw_tensor(plan, 0, range(10, 100))) == plan.nbytes
        assert tracemalloc.get_traced_memory()[1] < 40_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"name": "gpt-oss"}, "gpt-oss-20b, gpt-oss-120b, Qwen3-30B-A3B"),
        ({"name": "Kimi-K2", "layers": 1}, "layers 1: choose 2 to 61"),
        ({"name": "gpt-oss-20b", "layers": 25}, "layers 25: choose 1 to 24"),
        ({"name": "gpt-oss-20b", "seed": -1}, "seed -1"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        write_model_like(tmp_path / "x", **wrong)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_fit_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1_000_000_000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    with pytest.raises(ConfigError, match="13,761 MB do not fit on a disk with 1,000 MB free"):
        write_model_like(tmp_path / "x", "gpt-oss-20b")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(ConfigError, match="x cannot be written: File too large: free"):
            write_checkpoint(tmp_path / "x", small("Mixtral-8x7B"), {}, seed=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "x", small("Mixtral-8x7B"), {}, seed=0)
    before = read(tmp_path / "x", "lm_head.weight")

    def interrupt(wrote: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "x", small("Mixtral-8x7B"), {}, seed=1, progress=interrupt)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]
    assert torch.equal(read(tmp_path / "x", "lm_head.weight"), before)


def test_command_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PUBLISHED, "gpt-oss-20b", small("gpt-oss-20b"))
    words = ["demo-model", str(tmp_path / "x"), "--like", "gpt-oss-20b", "--seed", "3"]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert (result.exit_code, result.stdout) == (0, f"wrote {tmp_path / 'x'}\n")
    mark = json.loads((tmp_path / "x" / "demo_model.json").read_text())
    assert mark == {"like": "gpt-oss-20b", "layers": 2, "seed": 3}
    CliRunner().invoke(app, [*words, "--layers", "1"], catch_exceptions=False)
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    assert config["num_hidden_layers"] == 1
    with pytest.raises(ConfigError, match=r"--like sets the sizes: leave out --dtype, --top-k$"):
        CliRunner().invoke(
            app, [*words, "--top-k", "4", "--dtype", "bfloat16"], catch_exceptions=False
        )
