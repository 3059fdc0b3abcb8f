"""The bundled model on three servers answers as transformers alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from eaas.checkpoint import quiet_transformers
from eaas.config import load_config
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import ForkServer
from simulator.traces.record import read_prompts, record_trace

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

DOMAINS = ("code", "prose", "german", "manual")
TOKENS = 24


@pytest.fixture(scope="module")
def exact(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """The weights in float32, for which tokens must be equal."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("models") / "demo"
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(
            root / "examples" / "demo",
            dtype=torch.float32,
            local_files_only=True,
            experts_implementation="eager",
        ).eval()
        model.save_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(root / "examples" / "demo", local_files_only=True)
        tokenizer.save_pretrained(path)
    return path, model, tokenizer


@pytest.fixture(scope="module")
def endpoint(exact: tuple[Path, Any, Any], fork_server: ForkServer) -> Iterator[str]:
    """Three servers, two replicas of each expert."""
    config = load_config(frontend={"port": 0})
    with LocalCluster(exact[0], config=config, fork_server=fork_server) as cluster:
        yield cluster.endpoint


@pytest.fixture(scope="module")
def prompts(root: Path) -> list[str]:
    """One prompt per domain."""
    directory = root / "examples" / "traces" / "prompts"
    return [read_prompts(directory / f"{domain}.txt")[0] for domain in DOMAINS]


def test_greedy_tokens_equal_those_of_transformers(
    exact: tuple[Path, Any, Any], endpoint: str, prompts: list[str]
) -> None:
    _, model, tokenizer = exact
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")
        made = model.generate(**ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
        request = {
            "prompt": prompt,
            "max_tokens": TOKENS,
            "min_tokens": TOKENS,
            "temperature": 0,
        }
        answer = httpx.post(f"{endpoint}/v1/completions", json=request, timeout=60).json()
        expected = tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer["choices"][0]["text"] == expected
        assert answer["usage"]["completion_tokens"] == TOKENS


def test_a_chat_message_is_continued(endpoint: str, prompts: list[str]) -> None:
    """The model was trained on texts: its template adds nothing to a message."""
    usage = []
    for face, asked in (
        ("chat/completions", {"messages": [{"role": "user", "content": prompts[1]}]}),
        ("completions", {"prompt": prompts[1]}),
    ):
        request = {"max_tokens": TOKENS, "temperature": 0, **asked}
        answer = httpx.post(f"{endpoint}/v1/{face}", json=request, timeout=60).json()
        (choice,) = answer["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        usage.append((answer["usage"]["prompt_tokens"], text))
    assert usage[0] == usage[1]


def test_recorded_routing_equals_that_of_transformers(
    exact: tuple[Path, Any, Any], endpoint: str, prompts: list[str]
) -> None:
    # Prompts of unequal length: what fills the shorter one up is not counted, in halves of a batch either.
    path = exact[0]
    live = record_trace(path, prompts, batch=2, max_tokens=8, endpoint=endpoint)
    here = record_trace(path, prompts, batch=2, max_tokens=8)
    assert live.notes["experts"] == "in a cluster"
    assert live.counts_ILE.sum() > 0
    np.testing.assert_array_equal(live.counts_ILE, here.counts_ILE)
