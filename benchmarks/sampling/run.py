"""The measurement of `python -m benchmarks.sampling`."""

from __future__ import annotations

import time
from typing import Any

import torch

from attention_client.generation.sampling import Chooser, choose_tokens
from eaas.generation.sampling import Sampling
from eaas.generation.work import Work

__all__ = ["SETTINGS", "bench_sampling"]

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_k, top_p": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "penalties": {"frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "logprobs": {"logprobs": 5},
}
_PROMPT, _ANSWER = 200, 100
_SPREAD = 3.0  # of the logits


def bench_sampling(rows: int, vocabulary: int, rounds: int, device: str) -> dict[str, Any]:
    """Measure the best time of a step, in milliseconds, from settings to chosen tokens.

    Args:
        rows: Requests with a new token.
        vocabulary: Tokens of the vocabulary.
        rounds: Steps; the fastest counts.
        device: Where the logits are.
    """
    logits_BV = torch.randn(rows, vocabulary, device=device) * _SPREAD
    return {
        "rows": rows,
        "vocabulary": vocabulary,
        "device": device,
        "step_ms": {
            name: min(_step_s(logits_BV, settings) for _ in range(rounds)) * 1e3
            for name, settings in SETTINGS.items()
        },
    }


def _step_s(logits_BV: torch.Tensor, settings: dict[str, Any]) -> float:
    tokens = [*range(_PROMPT), *range(_ANSWER)]
    works = [
        Work(str(row), tokens, _PROMPT, 2 * _ANSWER, (), Sampling(seed=row, **settings))
        for row in range(len(logits_BV))
    ]
    choosers = [None if work.sampling.is_plain else Chooser(work) for work in works]

    def step() -> None:
        rows = [None if chooser is None else chooser.row(tokens) for chooser in choosers]
        choose_tokens(logits_BV, rows)

    step()  # builds the histories
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin
