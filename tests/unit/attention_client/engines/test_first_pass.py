"""The pass before a model serves: it names the router or the layer that would fail in every pass."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attention_client.engines.transformers.first_pass import check_first_pass
from attention_client.engines.transformers.loading import load_onto
from attention_client.engines.transformers.model import load_model
from eaas.checkpoint import Checkpoint
from eaas.errors import UnsupportedModelError


class Counting:
    """A cluster that answers zeros and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.metrics = SimpleNamespace()

    def layer_call(self, _layer: int, x_TH: torch.Tensor, *_: Any) -> torch.Tensor:
        self.calls += 1
        return torch.zeros_like(x_TH)


CLUSTER: Any = Counting()


def opened(path: Path) -> tuple[Any, Checkpoint]:
    checkpoint = Checkpoint.open(path)
    return load_model(checkpoint, CLUSTER), checkpoint


def assert_it_only_then_calls_the_cluster(model: Any) -> None:
    assert CLUSTER.calls == 0
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        model(torch.tensor([[1, 2, 3]]))
    assert CLUSTER.calls > 0
    CLUSTER.calls = 0


def refusal(model: Any, checkpoint: Checkpoint) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        check_first_pass(model, checkpoint)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{checkpoint.source}: ")
    assert_it_only_then_calls_the_cluster(model)
    return str(caught.value)


def test_groups_of_one_expert(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The router takes the two best of each group."""
    path = Path(shutil.copytree(checkpoint("deepseek_v3"), tmp_path / "copy"))
    config = json.loads((path / "config.json").read_text())
    groups = {"n_group": config["n_routed_experts"], "topk_group": 2}
    (path / "config.json").write_text(json.dumps(config | groups))
    with pytest.raises(UnsupportedModelError) as caught:
        load_onto(Checkpoint.open(path), CLUSTER)
    reason = "model.layers.1.mlp.gate fails in every pass (selected index k out of range)"
    assert str(caught.value).startswith(f"{path}: {reason}")
    assert "groups" in str(caught.value)


@pytest.mark.parametrize(
    ("arch", "dtype", "value"),
    [
        ("mixtral", "float32", float("nan")),
        ("deepseek_v3", "float32", float("inf")),
        ("gpt_oss", "float32", float("nan")),
        ("qwen3_moe", "bfloat16", float("inf")),
    ],
)
def test_a_good_model_passes_until_its_weights_are_no_numbers(
    checkpoint: Callable[..., Path], arch: str, dtype: str, value: float
) -> None:
    model, opened_checkpoint = opened(checkpoint(arch, dtype))
    check_first_pass(model, opened_checkpoint)
    assert_it_only_then_calls_the_cluster(model)
    router = opened_checkpoint.shape.layer_names[1].rpartition(".")[0]
    for name, parameter in model.get_submodule(router).named_parameters():
        if "shared" not in name:
            parameter.data.fill_(value)
    assert f"the router of {router} gives scores that are no numbers" in refusal(
        model, opened_checkpoint
    )


def test_logits_that_are_no_numbers(checkpoint: Callable[..., Path]) -> None:
    model, opened_checkpoint = opened(checkpoint("qwen3_moe"))
    model.lm_head.weight.data[7] = float("nan")
    assert "lm_head fails in every pass (the logits are no numbers)" in refusal(
        model, opened_checkpoint
    )


def test_a_layer_that_fails(checkpoint: Callable[..., Path]) -> None:
    model, opened_checkpoint = opened(checkpoint("qwen3_moe"))
    model.model.layers[2].self_attn.q_proj.weight = torch.nn.Parameter(
        torch.zeros(3, 3), requires_grad=False
    )
    assert "model.layers.2.self_attn.q_proj fails in every pass" in refusal(
        model, opened_checkpoint
    )
