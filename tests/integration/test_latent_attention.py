"""deepseek_v3 in continuous batching: the tokens of transformers' `generate`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer, DeepseekV3Config

import http_box
from attention_client.engines.transformers.paged.sequences import Sequences
from attention_client.generation.sizes import EngineSizes
from decoding import answers, drawn, eager, greedy
from eaas_cli.chaos.cluster import free_port
from eaas_cli.local import LocalCluster
from http_box import Box

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

TOKENS = 20
# More than the 32 tokens of a step: in chunks. Blocks have 16 tokens.
LENGTHS = (1, 2, 5, 16, 17, 40, 90, 150)


# Without overlap: test_random_checkpoints.py, too.
@pytest.mark.parametrize("overlap", [pytest.param("off", marks=pytest.mark.nightly), "on"])
def test_streams_of_different_lengths(
    overlap: str,
    checkpoint: Callable[..., Path],
    start_cluster: Callable[..., LocalCluster],
) -> None:
    """By real processes; twice, so that the second time the prompts' blocks are cached."""
    path = checkpoint("deepseek_v3")
    model, tokenizer = eager(path), AutoTokenizer.from_pretrained(path)
    prompts = [drawn(length, seed) for seed, length in enumerate(LENGTHS)]
    expected = [
        tokenizer.decode(greedy(model, p, TOKENS), skip_special_tokens=True) for p in prompts
    ]
    port = free_port("127.0.0.1")
    client = {"max_batch_tokens": 32, "overlap": overlap, "metrics_port": port}
    cluster = start_cluster(path, client=client)
    for _ in range(2):
        assert answers(cluster.endpoint, prompts, TOKENS) == expected

    def values(url: str) -> dict[str, str]:
        lines = httpx.get(f"{url}/metrics", timeout=10).text.splitlines()
        return dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")

    assert float(values(cluster.endpoint)["eaas_kv_cache_tokens"]) > 0
    engine = values(f"http://127.0.0.1:{port}")
    overlapped = float(engine.get('eaas_forward_passes_total{batch="overlap"}', 0))
    assert (overlapped > 0) == (overlap == "on")


def test_kimi_k2_in_real_processes(
    checkpoint: Callable[..., Path], start_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    """A model_type that transformers does not know, whose remote code is not there."""
    source, path = checkpoint("deepseek_v3"), tmp_path / "kimi"
    shutil.copytree(source, path)
    config = json.loads((path / "config.json").read_text()) | {
        "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    }
    (path / "config.json").write_text(json.dumps(config))
    prompt = drawn(17)
    expected = AutoTokenizer.from_pretrained(source).decode(
        greedy(eager(source), prompt, TOKENS), skip_special_tokens=True
    )
    cluster = start_cluster(path)
    assert answers(cluster.endpoint, [prompt], TOKENS) == [expected]


VARIANTS = {
    "wide values": {"v_head_dim": 24},
    "odd latents": {"kv_lora_rank": 13, "qk_rope_head_dim": 10, "v_head_dim": 5},
    "no low rank for queries": {"q_lora_rank": None},
    "rotated in halves": {"rope_interleave": False},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64,
        }
    },
    "40 heads": {"num_attention_heads": 40, "num_key_value_heads": 40},
    "bfloat16": {},
}


@pytest.fixture
def box(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    """A server with this variant; two blocks of 8 tokens are one chunk."""
    base = http_box.CONFIGS["deepseek_v3"].to_dict()
    del base["head_dim"]  # which follows from the others
    config = DeepseekV3Config(**base | VARIANTS[request.param])
    monkeypatch.setitem(http_box.CONFIGS, "deepseek_v3", config)
    if request.param == "bfloat16":
        plain = http_box.tiny_model
        monkeypatch.setattr(http_box, "tiny_model", lambda kind: plain(kind).bfloat16())
    with Box("deepseek_v3", EngineSizes(num_blocks=40, page_size=8, max_batch_tokens=16)) as box:
        yield box


@pytest.mark.parametrize("box", [name for name in VARIANTS if name != "bfloat16"], indirect=True)
def test_tokens_of_variants(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    past: list[int] = []
    positions = Sequences.positions

    def spy(self: Sequences) -> torch.Tensor:
        past.extend(self.past.tolist())
        return positions(self)

    monkeypatch.setattr(Sequences, "positions", spy)
    model = http_box.tiny_model("deepseek_v3")
    prompts = [drawn(n, n) for n in (1, 7, 8, 30, 50)]
    expected = [greedy(model, prompt, TOKENS) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = pool.map(lambda p: box.complete(p, max_tokens=TOKENS), prompts)
    texts = [a["choices"][0]["text"] for a in found]
    assert texts == [box.tokenizer.decode(e, skip_special_tokens=True) for e in expected]
    # A chunk of another prompt, and tokens of answers.
    assert 0 < min(filter(None, past)) < max(past)

    # The first 48 tokens are cached.
    past.clear()
    longer = prompts[-1][:48] + drawn(5, 99)
    answer = box.complete(longer, max_tokens=TOKENS)
    expected = greedy(model, longer, TOKENS)
    text = box.tokenizer.decode(expected, skip_special_tokens=True)
    assert answer["choices"][0]["text"] == text
    assert past[0] == 48


@pytest.mark.parametrize("box", ["bfloat16"], indirect=True)
def test_bfloat16_is_as_near_to_float32_as_transformers(box: Box) -> None:
    prompt = drawn(100)

    @torch.no_grad()
    def scores(model: Any) -> torch.Tensor:
        logits_TV = model(torch.tensor([prompt])).logits[0, :-1].float()
        return logits_TV.log_softmax(-1).gather(1, torch.tensor([prompt[1:]]).T)[:, 0]

    model = http_box.tiny_model("deepseek_v3")
    rounded_T = scores(model)
    exact_T = scores(model.float())
    choice = box.complete(prompt, echo=True, logprobs=1, max_tokens=1)["choices"][0]
    got_T = torch.tensor(choice["logprobs"]["token_logprobs"][1 : len(prompt)])
    error, usual = ((one_T - exact_T).abs().mean() for one_T in (got_T, rounded_T))
    assert float(error) < 1.5 * float(usual)
