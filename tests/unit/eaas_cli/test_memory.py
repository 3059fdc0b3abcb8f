"""The memory that a model takes is stated, and refused where it is not free."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eaas.checkpoint import precheck
from eaas.errors import ConfigError
from eaas_cli.local.memory import MemoryNeed, memory_need


def checkpoint(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    tensors = {
        "model.layers.0.mlp.experts.0.w1.weight": torch.zeros(100, 10),
        "model.layers.0.mlp.shared_experts.w1.weight": torch.zeros(5, 10),
        "lm_head.weight": torch.zeros(50),
    }
    save_file(tensors, path / "model.safetensors")
    return path


def test_experts_count_once_for_each_replica(tmp_path: Path) -> None:
    files = precheck(checkpoint(tmp_path / "m"))
    assert memory_need(files, 2, "none") == MemoryNeed(4000, 2, 400)
    assert memory_need(files, 2, "none").total == 8400
    assert memory_need(files, 3, "int4").experts < 1200


def test_what_does_not_fit_is_refused_with_the_remedy() -> None:
    need = MemoryNeed(12_000_000_000, 2, 4_000_000_000)
    need.refuse_more_than(28_000_000_000)
    with pytest.raises(
        ConfigError, match=r"takes 28\.0 GB .*, and 20\.0 GB are free: .*--redundancy 1"
    ):
        need.refuse_more_than(20_000_000_000)
    with pytest.raises(ConfigError, match="--quantization int4, or more machines"):
        need.refuse_more_than(15_000_000_000)
    assert str(need) == "experts 12.0 GB, 2 replicas 24.0 GB; other weights 4.0 GB"
