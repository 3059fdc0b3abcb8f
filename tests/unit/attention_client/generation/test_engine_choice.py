"""Which engine serves a model; an error of the engine's own code is no reason for the other one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, Qwen3Config

from attention_client.generation import batching
from attention_client.generation.sequential import SequentialEngine
from eaas.generation.work import Engine
from small_engines import engine_of

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32}


def chosen(config: Any) -> Engine:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return engine_of(model, num_blocks=4, page_size=16, max_batch_tokens=64)


def test_a_model_without_attention_runs_one_request_at_a_time() -> None:
    assert isinstance(chosen(MambaConfig(**SIZES, state_size=4)), SequentialEngine)


def test_an_error_of_the_engine_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise AttributeError("a slip")

    monkeypatch.setattr(batching, "PagedModel", broken)
    sizes = {"intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    with pytest.raises(AttributeError, match="a slip"):
        chosen(Qwen3Config(**SIZES, **sizes, head_dim=8))
