"""An incomplete checkpoint is refused: no tensor is initialised in place of a missing one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attention_client.engines.transformers.model import load_model
from eaas.checkpoint import Checkpoint
from eaas.errors import CheckpointError, MissingShardError, UnsupportedModelError

pytestmark = pytest.mark.integration

ATTENTION = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def copy(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "copy"))


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of the shard that holds ATTENTION, and the index with it."""
    index_file = path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    shard = path / index["weight_map"][ATTENTION]
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard, metadata={"format": "pt"})
    if ATTENTION not in tensors:
        del index["weight_map"][ATTENTION]
    index_file.write_text(json.dumps(index))


def load(path: Path) -> Any:
    return load_model(Checkpoint.open(path), SimpleNamespace())  # type: ignore[arg-type]


def test_a_tensor_that_is_missing(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors.pop(ATTENTION))
    with pytest.raises(MissingShardError, match=ATTENTION):
        load(copy)


def test_a_tensor_of_another_shape(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors.update({ATTENTION: tensors[ATTENTION][:-1].clone()}))
    with pytest.raises(UnsupportedModelError, match=r"\(63, 64\).*has \(64, 64\)"):
        load(copy)


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"max_new_tokens": -1})])
def test_a_generation_config_that_cannot_be_used(copy: Path, text: str) -> None:
    (copy / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        load(copy)


def test_a_missing_generation_config_is_fine(copy: Path) -> None:
    (copy / "generation_config.json").unlink()
    assert load(copy).generation_config is not None
