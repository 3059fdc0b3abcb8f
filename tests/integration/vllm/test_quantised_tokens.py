"""vLLM with a quantised checkpoint: the tokens of the embedded engine with the same experts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import attention_client
from decoding import generate as decode
from eaas_cli.demo_model import write_demo_model
from eaas_cli.local import LocalCluster
from quantized_checkpoint import SCHEMES, quantized_copy
from vllm_endpoint import VllmEndpoint
from vllm_python import NEEDS_VLLM, generate

pytestmark = [
    pytest.mark.integration,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    NEEDS_VLLM,
]

# As published, but for a checkpoint of few experts.
KIMI = {
    "model_type": "kimi_k2",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "n_group": 1,
    "topk_group": 1,
}
DEMO = Path(__file__).parents[3] / "examples/demo"
PROMPTS, TOKENS = 16, 24
# Each format; FP8 also with latent attention. MXFP4 is gpt-oss's.
CASES = [
    ("demo", "fp8"),
    ("demo", "gptq"),
    ("demo", "gptq-desc_act"),
    ("demo", "awq"),
    ("demo", "ct-int4"),
    ("demo", "ct-fp8"),
    ("kimi_k2", "fp8"),
    ("gpt_oss", "mxfp4"),
]


def some_prompts() -> list[list[int]]:
    """Prompts of different lengths."""
    dice = random.Random(5)
    return [[dice.randrange(20, 250) for _ in range(dice.randint(2, 60))] for _ in range(PROMPTS)]


def quantised(arch: str, scheme: str, directory: Path) -> Path:
    source = DEMO
    if arch != "demo":
        source = directory / arch
        base = "deepseek_v3" if arch == "kimi_k2" else arch
        # vLLM's attention on CPUs needs heads of 32 or more.
        write_demo_model(source, arch=base, layers=3, hidden=256, experts=8, top_k=2, seed=1)
    if arch == "kimi_k2":
        config = json.loads((source / "config.json").read_text()) | KIMI
        (source / "config.json").write_text(json.dumps(config))
    quantized_copy(source, directory / "model", SCHEMES[scheme])
    return directory / "model"


def embedded(path: Path, monitor: str, prompts: list[list[int]]) -> list[list[int]]:
    """The new tokens of the embedded engine's model."""
    model = attention_client.load(path, monitor)
    found = []
    for prompt in prompts:
        ids_BT = torch.tensor([prompt])
        inputs = {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT)}
        out_BT = decode(model, inputs, TOKENS, eos_token_id=-1)
        found.append(out_BT[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize(("arch", "scheme"), CASES, ids=[f"{a}-{s}" for a, s in CASES])
def test_greedy_tokens_equal_those_of_the_embedded_engine(
    start_cluster: Callable[..., LocalCluster], tmp_path: Path, arch: str, scheme: str
) -> None:
    path = quantised(arch, scheme, tmp_path)
    cluster = start_cluster(path, clients=0, servers=3, redundancy=2)
    monitor, prompts = cluster.monitor_address, some_prompts()
    expected = embedded(path, monitor, prompts)
    overrides = {"quantization_config": None}
    found, _ = generate(path, prompts, TOKENS, tmp_path, monitor, hf_overrides=overrides)
    assert {len(tokens) for tokens in expected} == {TOKENS}
    same = sum(ours == theirs for ours, theirs in zip(found, expected, strict=True))
    # vLLM's latent attention on CPUs rounds more than transformers': some tokens differ with local experts
    # and dequantised weights, too. A wrong weight would leave no answer as it is.
    assert same >= (PROMPTS // 2 if arch == "kimi_k2" else PROMPTS)


def test_eaas_vllm_hides_the_quantisation(
    start_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    """As a user starts it, with overrides of the user's own."""
    path = quantised("demo", "fp8", tmp_path)
    cluster = start_cluster(path, clients=0, servers=2, redundancy=1)
    options = ("--enforce-eager", "--max-model-len", "512", "--hf-overrides", '{"eos_token_id": 1}')
    endpoint = VllmEndpoint(path, cluster.monitor_address, tmp_path / "log", *options)
    try:
        endpoint.wait_serving()
        (answer,) = endpoint.streams(["The answer"], TOKENS).answers()
        assert answer.tokens == TOKENS
        assert answer.text
    finally:
        endpoint.end()


def test_without_the_override_one_line_says_what_to_add(
    start_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    path = quantised("demo", "ct-int4", tmp_path)
    cluster = start_cluster(path, clients=0, servers=1, redundancy=1)
    with pytest.raises(AssertionError, match=r"is quantised, .* add --hf-overrides"):
        generate(path, some_prompts()[:1], 1, tmp_path, cluster.monitor_address)
