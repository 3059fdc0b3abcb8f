"""Recording: every routed token of every forward pass is counted, padding is not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eaas.checkpoint import quiet_transformers
from eaas.errors import ConfigError
from eaas_cli.demo_model import write_demo_model
from simulator.traces.record import read_prompts, record_trace

PROMPTS = ["one two", "What makes bread rise? Tell me all of it."]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "gpt_oss"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("models") / request.param
    write_demo_model(path, arch=request.param, layers=3, hidden=64, experts=8, top_k=2)
    return path


def lengths(path: Path) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    return [len(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]


def test_passes_and_tokens(model_path: Path) -> None:
    parts: list[float] = []
    recorded = record_trace(model_path, PROMPTS, batch=2, max_tokens=4, progress=parts.append)
    per_layer = recorded.counts_ILE.sum(axis=2)
    assert recorded.experts == 8
    # The same tokens go through every layer.
    assert (per_layer == per_layer[:, :1]).all()
    assert per_layer[0, 0] == 2 * sum(lengths(model_path))
    assert 1 <= recorded.iterations <= 4
    assert (per_layer[1:] <= 2 * 2).all()
    assert parts == [1.0]
    assert recorded.notes["top_k"] == 2


def test_a_batch_routes_as_its_prompts_alone(model_path: Path) -> None:
    together = record_trace(model_path, PROMPTS, batch=2, max_tokens=1)
    alone = record_trace(model_path, PROMPTS, batch=1, max_tokens=1)
    assert (together.iterations, alone.iterations) == (1, 2)
    difference = np.abs(
        alone.counts_ILE.sum(axis=0, dtype=int) - together.counts_ILE[0].astype(int)
    )
    # Padded rows differ in the last bits: a tie may fall the other way.
    assert difference.sum() <= 2


def test_counts_are_the_routers_choice(model_path: Path) -> None:
    recorded = record_trace(model_path, PROMPTS[:1], max_tokens=1)
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            model_path, local_files_only=True, experts_implementation="eager"
        )
    tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    chosen = []
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(
                lambda _m, args, kwargs: chosen.append(
                    args[1] if len(args) > 1 else kwargs["top_k_index"]
                ),
                with_kwargs=True,
            )
    model(**tokenizer(PROMPTS[:1], return_tensors="pt"))
    expected = [np.bincount(ids.flatten().numpy(), minlength=8).tolist() for ids in chosen]
    assert recorded.counts_ILE[0].tolist() == expected


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("\ufeffone\n\n  \ntwo\u2028lines\n")
    assert read_prompts(path) == ("one", "two\u2028lines")
    path.write_text("\n")
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path)
