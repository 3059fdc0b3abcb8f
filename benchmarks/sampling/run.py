"""The measurement of `python -m benchmarks.sampling`."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch

from attention_client.serving.api_error import ApiError
from attention_client.serving.generation.sampling import BatchSampler, Sampling

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
    sampler = BatchSampler(_fail)
    requests = [_request(row, Sampling(seed=row, **settings)) for row in range(len(logits_BV))]
    sampler(logits_BV.clone(), sampler.prepare_tensor_args(requests))  # builds the histories
    scores_BV = logits_BV.clone()
    begin = time.perf_counter()
    chosen = sampler(scores_BV, sampler.prepare_tensor_args(requests)).argmax(dim=-1)
    chosen.tolist()  # waits for the device
    return time.perf_counter() - begin


def _fail(_request_id: str, error: ApiError) -> None:
    raise error


def _request(row: int, sampling: Sampling) -> Any:
    state = SimpleNamespace(
        request_id=str(row),
        initial_tokens=list(range(_PROMPT)),
        generated_tokens=list(range(_ANSWER)),
        logit_processor_kwargs={"sampling": sampling},
    )
    return SimpleNamespace(state=state)
