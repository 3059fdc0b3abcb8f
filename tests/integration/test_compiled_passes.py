"""Compiled forward passes: the same tokens as transformers' `eager`, through a kill, and from the store."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from completions import Load
from decoding import answers, drawn, eager, greedy
from eaas_cli.local import LocalCluster
from waiting import eventually

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
]

# Compilation takes half a minute of a core, and has a low priority: beside much other work that is minutes.
COMPILE_S = 330.0
TOKENS = 24
# The one of every run has sliding windows, sinks and biases.
USUAL = "gpt_oss"
# One with a window and one without; each further one would compile for 12 s.
LAYERS = 2
ARCHITECTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", USUAL)


@pytest.fixture
def start(
    start_cluster: Callable[..., LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., LocalCluster]:
    """Start clusters whose client compiles, with these settings of the client."""
    monkeypatch.setenv("EAAS_ATTENTION_CLIENT__COMPILE", "true")

    def start(model: Path, servers: int, **settings: object) -> LocalCluster:
        for name, value in settings.items():
            monkeypatch.setenv(f"EAAS_ATTENTION_CLIENT__{name.upper()}", str(value))
        return start_cluster(model, servers=servers, redundancy=min(servers, 2))

    return start


def is_compiled(cluster: LocalCluster) -> bool:
    text = httpx.get(f"{cluster.endpoint}/metrics", timeout=10).text
    return "eaas_passes_compiled 1.0" in text


def compiled(cluster: LocalCluster) -> LocalCluster:
    deadline = time.monotonic() + COMPILE_S
    while not is_compiled(cluster):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    return cluster


def expected_of(
    path: Path, prompts: list[list[int]], dtype: torch.dtype | None = None
) -> list[str]:
    """The texts of transformers alone, in the dtype of the checkpoint or another one."""
    model, tokenizer = eager(path, dtype), AutoTokenizer.from_pretrained(path)
    texts = [greedy(model, prompt, TOKENS) for prompt in prompts]
    return [tokenizer.decode(text, skip_special_tokens=True) for text in texts]


@pytest.mark.parametrize(
    "arch",
    [pytest.param(arch, marks=[pytest.mark.nightly] * (arch != USUAL)) for arch in ARCHITECTURES],
)
def test_tokens_equal_eager(
    arch: str, checkpoint: Callable[..., Path], start: Callable[..., LocalCluster]
) -> None:
    """Before, during and after the switch, under a load that leaves most of the processor to it.

    Then prompts of several lengths at once, in chunks; and again after one of three servers was killed.
    """
    path = checkpoint(arch, layers=LAYERS)
    prompts = [drawn(length) for length in (1, 5, 40, 90)]
    expected = expected_of(path, prompts)
    cluster = start(path, 3, max_batch_tokens=32)
    load = Load(cluster.endpoint, 1, TOKENS)
    with load.running(pause_s=0.5):
        assert not is_compiled(cluster)
        compiled(cluster)
        load.some_more()
    assert answers(cluster.endpoint, prompts, TOKENS) == expected
    cluster.running_servers()[0].signal(signal.SIGKILL)
    assert answers(cluster.endpoint, prompts, TOKENS) == expected


def test_experts_that_are_gone_fail_the_batch_alone_and_the_next_start_finds_the_pass(
    checkpoint: Callable[..., Path], start: Callable[..., LocalCluster]
) -> None:
    """The error of a layer call comes out of the compiled pass, and the engine goes on."""
    cluster = compiled(start(checkpoint(USUAL, layers=LAYERS), 1, layer_timeout_s=1.0))
    prompt = [30, 40, 50]
    right = answers(cluster.endpoint, [prompt], TOKENS)
    (server,) = cluster.running_servers()
    server.signal(signal.SIGSTOP)
    try:
        body = {"prompt": prompt, "max_tokens": 2}
        reply = httpx.post(f"{cluster.endpoint}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 503
        assert "layer" in reply.json()["error"]["message"]
    finally:
        server.signal(signal.SIGCONT)

    def answers_again() -> bool:
        try:
            return answers(cluster.endpoint, [prompt], TOKENS) == right
        except httpx.HTTPStatusError:
            return False

    eventually(answers_again, 30)
    again = start(checkpoint(USUAL, layers=LAYERS), 1)
    # It was there before the endpoint was.
    eventually(lambda: is_compiled(again), 10)


def test_a_model_served_one_request_at_a_time_stays_uncompiled(
    checkpoint: Callable[..., Path],
    start: Callable[..., LocalCluster],
    tmp_path: Path,
) -> None:
    """Latent attention with a window, which has no paged form."""
    path = copy_with(checkpoint("deepseek_v3"), tmp_path / "model", sliding_window=16)
    cluster = start(path, 1)
    assert answers(cluster.endpoint, [[30, 40, 50]], TOKENS)
    assert not is_compiled(cluster)


def copy_with(source: Path, path: Path, **config: object) -> Path:
    """Copy a checkpoint, with other values in config.json."""
    shutil.copytree(source, path)
    changed = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps(changed))
    return path


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 2.0 * i for i in range(8)],
    "original_max_position_embeddings": 32,
}


@pytest.mark.nightly
def test_frequencies_that_depend_on_the_length(
    checkpoint: Callable[..., Path],
    start: Callable[..., LocalCluster],
    tmp_path: Path,
) -> None:
    """A compiled pass computes them for each row: short requests beside long ones, and some grow."""
    path = copy_with(checkpoint("qwen3_moe"), tmp_path / "model", rope_parameters=LONGROPE)
    prompts = [drawn(length) for length in (1, 5, 28, 32, 33, 90)]
    cluster = compiled(start(path, 2, max_batch_tokens=48))
    for _ in range(2):  # the second time beside cached blocks
        assert answers(cluster.endpoint, prompts, TOKENS) == expected_of(path, prompts)


@pytest.mark.nightly
def test_float16(checkpoint: Callable[..., Path], start: Callable[..., LocalCluster]) -> None:
    path = checkpoint("qwen3_moe", "float16")
    prompts = [drawn(length) for length in (1, 40, 90)]
    cluster = compiled(start(path, 2))
    found = answers(cluster.endpoint, prompts, TOKENS)
    assert found == expected_of(path, prompts, torch.float32)
