"""vLLM with remote experts: the tokens of vLLM with its own experts, in less memory."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from eaas.checkpoint import Checkpoint
from eaas_cli.demo_model import write_demo_model
from eaas_cli.local import LocalCluster
from vllm_python import NEEDS_VLLM, generate

pytestmark = [
    pytest.mark.integration,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    NEEDS_VLLM,
]

ARCHITECTURES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss")
# The second has shared experts, which run while the servers compute.
COMPILED = ("qwen3_moe", "qwen2_moe")
CASES = [(arch, True) for arch in ARCHITECTURES] + [(arch, False) for arch in COMPILED]
PROMPTS, TOKENS = 64, 24
# Joining a cluster takes some 40 MB, which must be little against the experts.
LEAST_EXPERT_BYTES = 600e6


def some_prompts(number: int) -> list[list[int]]:
    """Prompts of different lengths."""
    dice = random.Random(5)
    return [[dice.randrange(20, 250) for _ in range(dice.randint(2, 60))] for _ in range(number)]


def expert_bytes(path: Path) -> int:
    checkpoint = Checkpoint.open(path)
    slices = [checkpoint.slice(tensor.key) for tensor in checkpoint.expert_tensors]
    return sum(math.prod(part.get_shape()) * part.dtype.itemsize for part in slices)


@pytest.mark.parametrize(
    ("arch", "eager"), CASES, ids=[f"{a}-{'eager' if e else 'compiled'}" for a, e in CASES]
)
def test_greedy_tokens_equal_those_of_local_experts(
    start_cluster: Callable[..., LocalCluster], tmp_path: Path, arch: str, eager: bool
) -> None:
    path = tmp_path / arch
    # vLLM's attention on CPUs needs heads of 32 or more.
    write_demo_model(path, arch=arch, layers=3, hidden=256, experts=8, top_k=2, seed=1)
    prompts = some_prompts(PROMPTS)
    expected, _ = generate(path, prompts, TOKENS, tmp_path, enforce_eager=eager)
    cluster = start_cluster(path, clients=0, servers=3, redundancy=2)
    monitor = cluster.monitor_address
    found, _ = generate(path, prompts, TOKENS, tmp_path, monitor, enforce_eager=eager)
    different = [
        n for n, (ours, theirs) in enumerate(zip(found, expected, strict=True)) if ours != theirs
    ]
    assert {len(tokens) for tokens in expected} == {TOKENS}
    assert not different, f"{len(different)} of {PROMPTS} prompts have other tokens: {different}"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_ranks_that_share_a_model(
    start_cluster: Callable[..., LocalCluster],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    expert_parallel: bool,
) -> None:
    """Each tensor-parallel rank is a client, of its share of the tokens."""
    path = tmp_path / "model"
    write_demo_model(path, layers=4, hidden=256, experts=8, top_k=2, seed=1)
    prompts = some_prompts(PROMPTS)
    expected, _ = generate(path, prompts, TOKENS, tmp_path)
    cluster = start_cluster(path, clients=0, servers=3, redundancy=2)
    cores = sorted(os.sched_getaffinity(0))[:2]
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, cores)))
    found, _ = generate(
        path,
        prompts,
        TOKENS,
        tmp_path,
        cluster.monitor_address,
        tensor_parallel_size=2,
        enable_expert_parallel=expert_parallel,
    )
    assert found == expected


def test_no_memory_for_the_experts(
    start_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    path = tmp_path / "large"
    write_demo_model(path, layers=4, hidden=512, experts=112, top_k=2, max_shard_size="1GB")
    size = expert_bytes(path)
    assert size >= LEAST_EXPERT_BYTES
    prompts = some_prompts(2)
    expected, with_experts = generate(path, prompts, 4, tmp_path)
    cluster = start_cluster(path, clients=0, servers=2, redundancy=1)
    found, without = generate(path, prompts, 4, tmp_path, cluster.monitor_address)
    print(
        f"{with_experts / 1e6:.0f} MB with {size / 1e6:.0f} MB of experts, {without / 1e6:.0f} MB"
    )
    assert found == expected
    assert with_experts - without > 0.9 * size
