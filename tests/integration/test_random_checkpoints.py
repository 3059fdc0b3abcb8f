"""Checkpoints with random settings and layouts answer as transformers does with the dequantised weights."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from decoding import answers, eager, greedy
from eaas.errors import EaasError
from eaas_cli.local import LocalCluster
from random_checkpoint import LONGEST, RandomCheckpoint

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

SEEDS = 300
# Each architecture, and each format that has a kernel: no codes, fp8, gptq-desc_act, ct-w8, ct-int4, mxfp4.
QUICK = {42, 25, 32, 3, 10, 11}
FIRST = int(os.environ.get("FIRST_CHECKPOINT", "0"))
# Of the quick seeds, and of the others.
FEW, MANY, TOKENS = 8, 16, 12


def alone(model: Any, prompt: list[int]) -> list[int]:
    """Greedy tokens of transformers, whose frequencies remember longer sequences until a short one comes."""
    with torch.no_grad():
        model(torch.tensor([prompt[:1]]))
    return greedy(model, prompt, TOKENS)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[pytest.mark.nightly] * (seed not in QUICK))
        for seed in range(FIRST, FIRST + SEEDS)
    ],
)
def test_random_checkpoint(
    start_cluster: Callable[..., LocalCluster],
    tmp_path: Path,
    seed: int,
) -> None:
    """Requests of mixed lengths at once, twice, in a cache that holds about three of them."""
    drawn = RandomCheckpoint.drawn(seed)
    print(drawn)
    path, plain = drawn.write(tmp_path)
    dice = random.Random(seed)
    prompts = [
        [dice.randrange(6, 300) for _ in range(dice.randint(1, LONGEST - TOKENS))]
        for _ in range(FEW if seed in QUICK else MANY)
    ]
    client = {"max_batch_tokens": 32, "cache_blocks": 8}
    if drawn.refusal is not None:
        with pytest.raises(EaasError, match=drawn.refusal) as refused:
            start_cluster(path, client=client)
        assert "\n" not in str(refused.value)
        return
    cluster = start_cluster(path, client=client)
    model, tokenizer = eager(plain), AutoTokenizer.from_pretrained(path)
    expected = [tokenizer.decode(alone(model, prompt)) for prompt in prompts]
    for _ in range(2):
        found = answers(cluster.endpoint, prompts, TOKENS, skip_special_tokens=False)
        assert found == expected
