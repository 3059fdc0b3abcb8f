"""Answers of a model with random scores, which follow a grammar."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from attention_client.serving.generation.guide import Grammar
from attention_client.serving.generation.sampling import BatchSampler, Sampling
from attention_client.serving.grammars.compiler import GrammarCompiler, Literal
from attention_client.serving.grammars.source import Part, Source

__all__ = ["compiled", "part", "random_answer"]


def part(kind: Any, text: str) -> Callable[[Literal], Source]:
    return lambda _: (Part("answer", kind, text),)


def compiled(
    compiler: GrammarCompiler, build: Callable[[Literal], Source], field: str = "f"
) -> Grammar:
    return Grammar(asyncio.run(compiler.compile(field, build)), compiler.end_tokens, field)


def _raise(_request: str, error: Exception) -> None:
    raise error


def random_answer(
    grammar: Grammar, vocabulary: int, seed: int, most: int = 400, evict: bool = False
) -> list[int] | None:
    """Draw an answer token by token, as the batching engine does, without its end token.

    Args:
        grammar: What it follows.
        vocabulary: Size of the vocabulary.
        seed: Seed of scores and draws.
        most: Most tokens; a longer answer is cut off, and None returned.
        evict: Whether the request is evicted and computed again after every third token.
    """
    scores = torch.Generator().manual_seed(seed)
    prompt = [1, 2, 3]
    settings = Sampling(1.0, seed=seed, prompt_length=len(prompt), grammar=grammar)
    sampling, guide = settings.guided()
    keywords = {"sampling": sampling, "guide": guide}
    state = SimpleNamespace(
        request_id="r", initial_tokens=prompt, generated_tokens=[], logit_processor_kwargs=keywords
    )
    sampler = BatchSampler(_raise)
    for step in range(most):
        if evict and step % 3 == 2:
            state = _evicted(state)
        sampler.prepare_tensor_args([SimpleNamespace(state=state)])
        scores_1V = torch.randn(1, vocabulary, generator=scores)
        token = int(sampler(scores_1V, torch.zeros(1)).argmax())
        if token in grammar.end_tokens:
            return [*state.initial_tokens, *state.generated_tokens][len(prompt) :]
        state.generated_tokens.append(token)
    return None


def _evicted(state: Any) -> Any:
    from transformers.generation.continuous_batching.requests import RequestState

    before = RequestState(
        "r",
        initial_tokens=state.initial_tokens,
        logit_processor_kwargs=state.logit_processor_kwargs,
    )
    before.generated_tokens = state.generated_tokens
    return before.create_equivalent_initial_request()
