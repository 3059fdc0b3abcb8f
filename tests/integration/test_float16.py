"""Checkpoints in float16: computed in float32 on both sides, with the cache of the other dtypes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from decoding import answers, drawn, eager, greedy
from eaas_cli.local import LocalCluster
from quantized_checkpoint import SCHEMES, quantized_copy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

DEMO = Path(__file__).parents[2] / "examples/demo"
TOKENS = 20
# The least size of a cache.
FEW_TOKENS = 4096


def with_dtype(path: Path, dtype: str) -> Path:
    """Change the dtype in config.json."""
    config = json.loads((path / "config.json").read_text()) | {"dtype": dtype}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gptq"])
def test_tokens_and_cache(
    kind: str,
    checkpoint: Callable[..., Path],
    start_cluster: Callable[..., LocalCluster],
    tmp_path: Path,
) -> None:
    if kind == "gptq":
        path = tmp_path / "model"
        plain = quantized_copy(DEMO, path, SCHEMES["gptq-desc_act"])
        with_dtype(path, "float16")
    else:
        plain = path = checkpoint(kind, "float16")
    model, tokenizer = eager(plain, torch.float32), AutoTokenizer.from_pretrained(path)
    prompts = [drawn(length) for length in (1, 17, 90)]
    found = [greedy(model, prompt, TOKENS) for prompt in prompts]
    expected = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in found]
    cluster = start_cluster(path, servers=2)
    assert answers(cluster.endpoint, prompts, TOKENS) == expected
    assert cache_tokens(cluster) > FEW_TOKENS
    logs = "".join(file.read_text() for file in (tmp_path / "logs-0").iterdir())
    assert "weights in float16 are computed in float32" in logs


def test_bfloat16_by_config(
    checkpoint: Callable[..., Path], start_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    """The remedy that the log names: half the memory, so twice the tokens."""
    source, path = checkpoint("qwen3_moe", "float16"), tmp_path / "model"
    shutil.copytree(source, path)
    cluster = start_cluster(with_dtype(path, "bfloat16"), servers=1, redundancy=1)
    body = {"prompt": "The sea", "max_tokens": 4}
    reply = httpx.post(f"{cluster.endpoint}/v1/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    assert cache_tokens(cluster) > FEW_TOKENS


def cache_tokens(cluster: LocalCluster) -> float:
    metrics = httpx.get(f"{cluster.endpoint}/metrics", timeout=10).text
    line = next(x for x in metrics.splitlines() if x.startswith("eaas_kv_cache_tokens "))
    return float(line.split()[1])
