"""Loads in several threads: each model is right, and other threads' models see nothing of them."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_tie_weights
from transformers.monkey_patching import get_patch_mapping
from transformers.utils import logging

from attention_client.engines.transformers.model import load_model
from eaas.checkpoint import Checkpoint
from eaas.checkpoint import construct as construct_module
from eaas.checkpoint.construct import construct
from eaas.errors import MissingShardError
from eaas_cli.demo_model import write_demo_model

ROUNDS, LOADS = 3, 4


def copy(source: Path, made: Path, without: str, **config: object) -> Path:
    """Copy a checkpoint without one tensor."""
    made.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for shard in source.glob("*.safetensors"):
        tensors |= load_file(shard)
    del tensors[without]
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((source / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(written | config))
    return made


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose head is tied to its embedding, in another dtype than torch's default."""
    work = tmp_path_factory.mktemp("threads")
    write_demo_model(work / "demo", layers=3, hidden=32, experts=8, top_k=2, dtype="bfloat16")
    return copy(work / "demo", work / "tied", "lm_head.weight", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def broken(path: Path) -> Path:
    """The same without a tensor, which shows only after the model is constructed."""
    return copy(path, path.parent / "broken", "model.norm.weight")


def state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def test_every_load_is_right_and_unseen(path: Path, broken: Path) -> None:
    plain = state(AutoModelForCausalLM.from_pretrained(path))
    opened = Checkpoint.open(path)
    experts = {f"{name}." for name in opened.shape.layer_names}
    rest = {k: v for k, v in plain.items() if not any(k.startswith(name) for name in experts)}
    assert plain.keys() != rest.keys()
    before = torch.get_default_dtype(), PreTrainedModel.tie_weights, logging.get_verbosity()
    start = threading.Barrier(LOADS + 2)

    def remote() -> None:
        for _ in range(ROUNDS):
            start.wait(60)
            model = load_model(Checkpoint.open(path), None)
            assert_same(state(model), rest)
            assert model.lm_head.weight is model.model.embed_tokens.weight

    def fails() -> None:
        for _ in range(ROUNDS):
            start.wait(60)
            with pytest.raises(MissingShardError, match=r"model\.norm\.weight"):
                load_model(Checkpoint.open(broken), None)

    def local() -> None:
        for _ in range(ROUNDS):
            start.wait(60)
            # Two at a time disturb one another, without any help.
            for _ in range(2):
                assert_same(state(AutoModelForCausalLM.from_pretrained(path)), plain)

    with ThreadPoolExecutor(LOADS + 2) as threads:
        futures = [threads.submit(remote) for _ in range(LOADS)]
        futures += [threads.submit(fails), threads.submit(local)]
        for future in futures:
            try:
                future.result()
            except BaseException:
                start.abort()
                raise
    after = torch.get_default_dtype(), PreTrainedModel.tie_weights, logging.get_verbosity()
    assert after == before
    assert get_patch_mapping() == {}
    assert_same(state(AutoModelForCausalLM.from_pretrained(path)), plain)


def test_a_first_import_while_another_thread_loads(path: Path) -> None:
    """transformers' loader hides the method that ties weights from the whole process."""
    config = Checkpoint.open(path).config
    spec = importlib.util.spec_from_file_location("imported_late", construct_module.__file__)
    assert spec is not None
    assert spec.loader is not None
    late = importlib.util.module_from_spec(spec)
    is_hidden = threading.Event()

    def hide() -> None:
        with no_tie_weights():
            is_hidden.set()
            time.sleep(0.2)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(hide)
        assert is_hidden.wait(30)
        spec.loader.exec_module(late)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    with no_tie_weights():
        model = late.construct(model_class, config, torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("qwen3_moe", torch.float32),
        ("qwen2_moe", torch.bfloat16),
        ("mixtral", torch.float16),
        ("olmoe", torch.float32),
        ("deepseek_v3", torch.bfloat16),
        ("gpt_oss", torch.float16),
    ],
)
def test_a_model_is_constructed_as_transformers_does(
    checkpoint: Callable[..., Path], arch: str, dtype: torch.dtype
) -> None:
    config = Checkpoint.open(checkpoint(arch)).config
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    found = construct(model_class, config, dtype)
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(config, dtype=dtype)
    kinds = [
        {name: (value.dtype, value.shape, value.device) for name, value in state(model).items()}
        for model in (found, expected)
    ]
    assert kinds[0] == kinds[1]
    assert found.config.to_dict() == expected.config.to_dict()
