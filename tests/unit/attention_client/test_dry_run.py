"""Router dry runs, and the routes seen while a model runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry, Counter

from attention_client.engines.transformers.dry_run import RouterDryRun
from attention_client.engines.transformers.model import load_model
from attention_client.engines.transformers.overlap.decoder import DoubleBatch
from eaas.checkpoint import Checkpoint

ARCHITECTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss")
TOKENS = list(range(20, 57))


class NoExperts:
    """A cluster whose experts return zeros."""

    def __init__(self) -> None:
        self.calls = 0

    def layer_call(self, layer: int, x_TH: torch.Tensor, *_: Any) -> torch.Tensor:
        self.calls += 1
        return torch.zeros_like(x_TH)


def load(path: Path) -> tuple[Any, NoExperts]:
    cluster = NoExperts()
    return load_model(Checkpoint.open(path), cluster), cluster  # type: ignore[arg-type]


def without_attention(model: Any) -> Any:
    for name, parameter in model.named_parameters():
        if ".o_proj." in name:
            parameter.data.zero_()
    return model


def routes(model: Any, tokens_BT: torch.Tensor, layers: int) -> np.ndarray:
    tap = RouterDryRun(model, 1).tap
    with torch.no_grad(), tap.watching(layers) as seen:
        model(input_ids=tokens_BT, use_cache=False)
    ids_LTK = seen.ids_LTK()
    assert ids_LTK is not None
    return ids_LTK


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_without_attention_the_dry_run_is_exact(checkpoint: Callable[..., Path], arch: str) -> None:
    model, cluster = load(checkpoint(arch))
    without_attention(model)
    # Shared and dense experts would add something; only deepseek_v3 has some before its first MoE layer.
    layers = 0 if arch == "deepseek_v3" else 1 if arch == "qwen2_moe" else 3
    dry_run = RouterDryRun(model, 3)
    ids_LTK = dry_run(TOKENS)
    shape = dry_run.tap.shape
    assert ids_LTK.shape == (shape.num_layers, len(TOKENS), shape.top_k)
    assert dry_run.layers == shape.num_layers
    assert cluster.calls == 0
    seen_LTK = routes(model, torch.tensor([TOKENS]), shape.num_layers)
    for layer in range(layers):
        assert (np.sort(seen_LTK[layer]) == np.sort(ids_LTK[layer])).all()
    assert (ids_LTK >= 0).all()
    assert (ids_LTK < shape.num_experts).all()


def test_a_dry_run_in_parts_equals_the_whole(checkpoint: Callable[..., Path]) -> None:
    dry_run = RouterDryRun(load(checkpoint())[0], 2)
    parts = [dry_run(TOKENS[:9]), dry_run(TOKENS[9:])]
    assert (np.concatenate(parts, axis=1) == dry_run(TOKENS)).all()


def test_routes_of_micro_batches_are_in_batch_order(checkpoint: Callable[..., Path]) -> None:
    tokens_BT = torch.arange(20, 20 + 5 * 11).view(5, 11)
    whole, _ = load(checkpoint())
    expected_LTK = routes(whole, tokens_BT, 2)

    model, cluster = load(checkpoint())

    def start_layer_call(layer: int, x_TH: torch.Tensor, *_: Any) -> Any:
        return nullcontext(SimpleNamespace(finish=lambda: torch.zeros_like(x_TH)))

    cluster.start_layer_call = start_layer_call  # type: ignore[attr-defined]
    counter = Counter("forwards", "", ["batch"], registry=CollectorRegistry())
    DoubleBatch(model, "on", counter)
    assert (routes(model, tokens_BT, 2) == expected_LTK).all()
    assert counter.labels("overlap")._value.get() == 1


def test_a_model_with_local_experts_is_refused(checkpoint: Callable[..., Path]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint())
    with pytest.raises(ValueError, match="in this process"):
        RouterDryRun(model, 1)


def test_an_incomplete_pass_has_no_routes(checkpoint: Callable[..., Path]) -> None:
    model, _ = load(checkpoint())
    tap = RouterDryRun(model, 1).tap
    with tap.watching(3) as seen:
        assert seen.ids_LTK() is None
        tap.see(0, torch.tensor([[1, 2]]), None)
        tap.see(1, torch.tensor([[1, 2]]), None)
        assert seen.ids_LTK() is None
        tap.see(2, torch.tensor([[1, 2], [3, 4]]), None)
        assert seen.ids_LTK() is None
