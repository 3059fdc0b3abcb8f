"""Compiled forward passes: the same tokens as transformers' `eager`, through a kill, and from the store."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from completions import Load
from decoding import eager
from eaas_cli.local import LocalCluster
from waiting import eventually

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
]

COMPILE_S = 330.0
TOKENS = 24
ARCHITECTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss")


@pytest.fixture
def start(
    start_cluster: Callable[..., LocalCluster], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., LocalCluster]:
    """Start clusters whose client compiles, with these settings of the client."""
    monkeypatch.setenv("EAAS_ATTENTION_CLIENT__COMPILE", "true")

    def start(model: Path, servers: int, **settings: object) -> LocalCluster:
        for name, value in settings.items():
            monkeypatch.setenv(f"EAAS_ATTENTION_CLIENT__{name.upper()}", str(value))
        # The session's fork server has another environment.
        return start_cluster(model, servers=servers, redundancy=min(servers, 2), fork_server=None)

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


def answer(cluster: LocalCluster, prompt: list[int]) -> str:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{cluster.endpoint}/v1/completions", json=body, timeout=120)
    text: str = reply.raise_for_status().json()["choices"][0]["text"]
    return text


def drawn(length: int) -> list[int]:
    dice = torch.Generator().manual_seed(length)
    return torch.randint(20, 250, (length,), generator=dice).tolist()


def expected_of(
    path: Path, prompts: list[list[int]], dtype: torch.dtype | None = None
) -> list[str]:
    """The texts of transformers alone, in the dtype of the checkpoint or another one."""
    model, tokenizer = eager(path, dtype), AutoTokenizer.from_pretrained(path)
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        texts.append(tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True))
    return texts


@pytest.mark.parametrize(
    "arch",
    [
        pytest.param(arch, marks=[pytest.mark.nightly] * (arch != "gpt_oss"))
        for arch in ARCHITECTURES
    ],
)
def test_tokens_equal_eager(
    arch: str,
    checkpoint: Callable[..., Path],
    start: Callable[..., LocalCluster],
) -> None:
    """Prompts of several lengths at once, in chunks; then again after one of three servers was killed."""
    path = checkpoint(arch)
    prompts = [drawn(length) for length in (1, 5, 40, 90)]
    expected = expected_of(path, prompts)
    cluster = compiled(start(path, 3, max_batch_tokens=32))
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(lambda p: answer(cluster, p), prompts)) == expected
        cluster.running_servers()[0].signal(signal.SIGKILL)
        assert list(pool.map(lambda p: answer(cluster, p), prompts)) == expected


def test_a_start_finds_the_compiled_pass(
    checkpoint: Callable[..., Path],
    start: Callable[..., LocalCluster],
) -> None:
    path = checkpoint("qwen3_moe")
    compiled(start(path, 2))
    again = start(path, 2)
    # It was there before the endpoint was.
    eventually(lambda: is_compiled(again), 10)


@pytest.mark.alone
def test_answers_do_not_change_when_the_pass_is_ready(
    checkpoint: Callable[..., Path],
    start: Callable[..., LocalCluster],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A load runs from the uncompiled start until after the switch; compilation gets what it leaves."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = checkpoint("qwen3_moe")
    cluster = start(path, 2)
    load = Load(cluster.endpoint, 1, TOKENS)
    with load.running():
        assert not is_compiled(cluster)
        compiled(cluster)
        load.some_more()


def test_experts_that_are_gone_fail_the_batch_alone(
    checkpoint: Callable[..., Path],
    start: Callable[..., LocalCluster],
) -> None:
    """The error of a layer call comes out of the compiled pass, and the engine goes on."""
    path = checkpoint("qwen3_moe")
    cluster = compiled(start(path, 1, layer_timeout_s=1.0))
    right = answer(cluster, [30, 40, 50])
    (server,) = cluster.running_servers()
    server.signal(signal.SIGSTOP)
    try:
        body = {"prompt": [30, 40, 50], "max_tokens": 2}
        reply = httpx.post(f"{cluster.endpoint}/v1/completions", json=body, timeout=60)
        assert reply.status_code == 503
        assert "layer" in reply.json()["error"]["message"]
    finally:
        server.signal(signal.SIGCONT)
    eventually(lambda: _answers(cluster, right), 30)


def _answers(cluster: LocalCluster, right: str) -> bool:
    try:
        return answer(cluster, [30, 40, 50]) == right
    except httpx.HTTPStatusError:
        return False


def test_a_model_served_one_request_at_a_time_stays_uncompiled(
    checkpoint: Callable[..., Path],
    start: Callable[..., LocalCluster],
    tmp_path: Path,
) -> None:
    """Latent attention with a window, which has no paged form."""
    path = copy_with(checkpoint("deepseek_v3"), tmp_path / "model", sliding_window=16)
    cluster = start(path, 1)
    assert answer(cluster, [30, 40, 50])
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
    with ThreadPoolExecutor(len(prompts)) as pool:
        for _ in range(2):  # the second time beside cached blocks
            found = list(pool.map(lambda p: answer(cluster, p), prompts))
            assert found == expected_of(path, prompts)


@pytest.mark.nightly
def test_float16(checkpoint: Callable[..., Path], start: Callable[..., LocalCluster]) -> None:
    path = checkpoint("qwen3_moe", "float16")
    prompts = [drawn(length) for length in (1, 40, 90)]
    cluster = compiled(start(path, 2))
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda p: answer(cluster, p), prompts))
    assert found == expected_of(path, prompts, torch.float32)
