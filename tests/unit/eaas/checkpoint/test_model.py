"""Checkpoints as transformers sees them: shapes, expert tensors, and what cannot be served."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eaas.checkpoint import Checkpoint, quiet_transformers
from eaas.errors import (
    CorruptShardError,
    DenseModelError,
    MissingShardError,
    NotACheckpointError,
    UnsupportedModelError,
)
from eaas_cli.demo_model import write_demo_model

SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
}


def save(config: Any, path: Path) -> Path:
    with quiet_transformers():
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def save_config(path: Path, **config: object) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(2)}, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "deepseek"
    sizes = {"layers": 3, "hidden": 64, "experts": 8, "top_k": 2, "vocab": 400}
    write_demo_model(path, "deepseek_v3", max_shard_size="100KB", **sizes)
    return path


KIMI = {
    "model_type": "kimi_k2",
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
}


def changed(source: Path, to: Path, fields: dict[str, Any]) -> Path:
    """A copy of a checkpoint with other fields in its config."""
    shutil.copytree(source, to)
    config = json.loads((to / "config.json").read_text()) | fields
    (to / "config.json").write_text(json.dumps(config))
    return to


def test_kimi_k2_is_read_as_deepseek_v3(deepseek: Path, tmp_path: Path) -> None:
    """Its code is not run, and need not be there."""
    own = Checkpoint.open(deepseek)
    kimi = Checkpoint.open(changed(deepseek, tmp_path / "kimi", KIMI))
    assert type(kimi.config) is type(own.config)
    assert kimi.config.to_diff_dict() | {"transformers_version": ""} == (
        own.config.to_diff_dict() | {"transformers_version": ""}
    )
    assert kimi.expert_keys() == own.expert_keys()
    assert kimi.shape == replace(own.shape, digest=kimi.shape.digest)
    other = changed(deepseek, tmp_path / "other", KIMI | {"architectures": ["KimiForCausalLM"]})
    with pytest.raises(UnsupportedModelError, match="'kimi_k2'"):
        Checkpoint.open(other)


def test_keys_are_divided_between_experts_and_the_rest(deepseek: Path) -> None:
    checkpoint = Checkpoint.open(deepseek)
    shape = checkpoint.shape
    # Only layers with experts count.
    assert shape.layer_names == ("model.layers.1.mlp.experts", "model.layers.2.mlp.experts")
    assert (shape.num_experts, shape.hidden_size, shape.top_k) == (8, 64, 2)
    assert (shape.model_type, shape.dtype) == ("deepseek_v3", "float32")
    assert len(shape.digest) == 64
    experts, others = checkpoint.expert_keys(), checkpoint.other_keys()
    assert experts | others == set(checkpoint.keys)
    assert not experts & others
    assert all(".mlp.experts." in key for key in experts)
    assert len(experts) == 2 * 8 * 3
    assert any("shared_experts" in key for key in others)
    tenth = [t for t in checkpoint.expert_tensors if t.key.endswith("experts.7.up_proj.weight")]
    assert {(t.layer, t.expert) for t in tenth} == {(0, 7), (1, 7)}
    with pytest.raises(KeyError):
        checkpoint.slice("nothing")


def test_unused_tensors_are_ignored(deepseek: Path, tmp_path: Path) -> None:
    """DeepSeek's checkpoints carry a layer for multi-token prediction; transformers drops it."""
    for file in deepseek.iterdir():
        (tmp_path / file.name).symlink_to(file)
    extra = "model.layers.3.mlp.experts.0.up_proj.weight"
    save_file({extra: torch.zeros(2, 2)}, tmp_path / "extra.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][extra] = "extra.safetensors"
    index.unlink()
    index.write_text(json.dumps(content))
    checkpoint = Checkpoint.open(tmp_path)
    assert extra in checkpoint.keys
    assert extra not in checkpoint.expert_keys() | checkpoint.other_keys()


def test_a_shard_removed_or_damaged_after_opening(deepseek: Path, tmp_path: Path) -> None:
    for file in deepseek.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    checkpoint = Checkpoint.open(tmp_path)
    key = "lm_head.weight"
    shard = tmp_path / checkpoint.keys[key]
    shard.write_bytes(b"nothing")
    with pytest.raises(CorruptShardError, match=f"{shard.name}.*{key}"):
        checkpoint.slice(key)
    shard.unlink()
    with pytest.raises(MissingShardError, match=f"{shard.name}.*{key}"):
        checkpoint.slice(key)


def test_experts_without_a_gate_and_prefixed_names(tmp_path: Path) -> None:
    config = transformers.NemotronHConfig(
        vocab_size=50,
        hidden_size=32,
        layers_block_type=["attention", "moe"],
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=24,
        moe_intermediate_size=24,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_shared_expert_intermediate_size=16,
        moe_latent_size=16,
    )
    checkpoint = Checkpoint.open(save(config, tmp_path))
    assert checkpoint.shape.hidden_size == 16  # what enters an expert, not the model's width
    assert all(key.startswith("backbone.") for key in checkpoint.expert_keys())
    assert len(checkpoint.expert_keys()) == 8


ONLY_DENSE = {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0, 1]}


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        ("LlamaConfig", {}, "another engine"),
        ("Qwen3Config", {}, "another engine"),
        # An architecture with experts, whose layers are all dense.
        ("Qwen3MoeConfig", ONLY_DENSE, "has no layer with"),
    ],
)
def test_dense_models(tmp_path: Path, name: str, fields: dict[str, Any], why: str) -> None:
    config = getattr(transformers, name)(**SMALL, **fields)
    with pytest.raises(DenseModelError, match=why):
        Checkpoint.open(save(config, tmp_path))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral"])
def test_a_dense_architecture_with_fields_for_experts(tmp_path: Path, model_type: str) -> None:
    path = save_config(tmp_path / "x", model_type=model_type, num_local_experts=4)
    with pytest.raises(DenseModelError, match=f"{model_type} with this config has no layer with"):
        Checkpoint.open(path)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama4_text", "num_local_experts": 4},
        {"model_type": "jetmoe", "num_local_experts": 4},
        {"model_type": "dbrx", "ffn_config": {"moe_num_experts": 4}},
        {"model_type": "longcat_flash", "n_routed_experts": 4},
    ],
    ids=lambda config: config["model_type"],
)
def test_experts_outside_the_interface_are_named(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(
        UnsupportedModelError, match=rf"{config['model_type']} has custom experts code"
    ):
        Checkpoint.open(save_config(tmp_path / "x", **config))


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"model_type": "nothing_known", "num_experts": 4}, "nothing_known"),
        (
            {"model_type": "mine_moe", "auto_map": {"AutoConfig": "mine.Config"}},
            "its own code is not run",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts_per_tok": 2, "decoder_sparse_step": "x"},
            "config",
        ),
        ({"model_type": "t5", "num_experts": 4}, "causal"),
        *(
            ({"model_type": "qwen3_moe", "num_experts": 4, "text_config": value}, "no text_config")
            for value in ({}, {"num_experts": 4}, [1], "x")
        ),
    ],
)
def test_unsupported(tmp_path: Path, config: dict[str, Any], word: str) -> None:
    with pytest.raises(UnsupportedModelError, match=word) as caught:
        Checkpoint.open(save_config(tmp_path / "x", **config))
    assert "\n" not in str(caught.value)


def test_float64_is_rounded_to_float32(tmp_path: Path) -> None:
    """No kernel and no message has float64."""
    path = tmp_path / "demo"
    write_demo_model(path, "qwen3_moe", layers=1, hidden=64, experts=4, top_k=2, vocab=400)
    (shard,) = path.glob("*.safetensors")
    save_file({name: tensor.double() for name, tensor in load_file(shard).items()}, shard)
    for dtype in ({"dtype": "float64"}, {"dtype": None}):
        assert Checkpoint.open(changed(path, tmp_path / str(dtype), dtype)).shape.dtype == "float32"


def test_missing_layers_are_found_on_use(tmp_path: Path) -> None:
    config = {**SMALL, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    assert Checkpoint.open(save_config(tmp_path / "x", **config)).expert_keys() == frozenset()


def test_a_name_from_the_hub_is_not_downloaded() -> None:
    with pytest.raises(NotACheckpointError, match="local directory"):
        Checkpoint.open("mistralai/Mixtral-8x7B-v0.1")
