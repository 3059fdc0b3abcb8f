"""Greedy decoding, by transformers alone and through a cluster."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import attention_client
from attention_client.engines.transformers.remote_experts import remote_experts

__all__ = [
    "answers",
    "cluster_of",
    "drawn",
    "eager",
    "generate",
    "greedy",
    "prompts",
    "ragged",
]


@functools.lru_cache(maxsize=1)
def eager(path: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The checkpoint in this process alone, in its dtype or another one."""
    options = {} if dtype is None else {"dtype": dtype}
    return AutoModelForCausalLM.from_pretrained(
        path, experts_implementation="eager", **options
    ).eval()


def cluster_of(model: PreTrainedModel) -> attention_client.Cluster:
    """The cluster that holds a model's experts."""
    experts = remote_experts(model)
    assert experts is not None
    return experts.cluster


def prompts(batch: int, length: int = 12) -> dict[str, torch.Tensor]:
    """Prompts of equal length."""
    dice = torch.Generator().manual_seed(5)
    ids_BT = torch.randint(20, 250, (batch, length), generator=dice)
    return {"input_ids": ids_BT, "attention_mask": torch.ones_like(ids_BT)}


def ragged(batch: int, longest: int = 17) -> dict[str, torch.Tensor]:
    """Left-padded prompts of different lengths."""
    inputs = prompts(batch, longest)
    for row in range(batch):
        padding = longest - 1 - (7 * row + 4) % longest
        for values_BT in inputs.values():
            values_BT[row, :padding] = 0
    return inputs


def generate(
    model: Any, inputs: dict[str, torch.Tensor], tokens: int, **options: Any
) -> torch.Tensor:
    """Prompts and their greedy continuations."""
    out_BT: torch.Tensor = model.generate(
        **inputs, max_new_tokens=tokens, do_sample=False, **options
    )
    return out_BT


def drawn(length: int, seed: int | None = None) -> list[int]:
    """A random prompt."""
    dice = torch.Generator().manual_seed(length if seed is None else seed)
    return torch.randint(20, 250, (length,), generator=dice).tolist()


def greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """The greedy continuation of one prompt, whatever its end token."""
    ids_1T = torch.tensor([prompt])
    inputs = {"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T)}
    return generate(model, inputs, tokens, eos_token_id=-1)[0, len(prompt) :].tolist()


def answers(
    endpoint: str | None, asked: Sequence[list[int]], tokens: int, **fields: Any
) -> list[str]:
    """The greedy completions of prompts that are sent at once."""
    body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True} | fields

    def ask(prompt: list[int]) -> str:
        reply = httpx.post(
            f"{endpoint}/v1/completions", json=body | {"prompt": prompt}, timeout=120
        )
        return str(reply.raise_for_status().json()["choices"][0]["text"])

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(ask, asked))
