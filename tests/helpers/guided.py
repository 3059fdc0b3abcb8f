"""Answers of a model with random scores, which follow a grammar."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch

from attention_client.generation.sampling import Chooser, choose_tokens
from eaas.generation.grammar import Grammar
from eaas.generation.sampling import Sampling
from eaas.generation.work import Work
from frontend.grammars import Part, Source
from frontend.grammars.compiler import GrammarCompiler, Literal

__all__ = ["compiled", "part", "random_answer"]


def part(kind: Any, text: str) -> Callable[[Literal], Source]:
    return lambda _: (Part("answer", kind, text),)


def compiled(
    compiler: GrammarCompiler, build: Callable[[Literal], Source], field: str = "f"
) -> Grammar:
    return asyncio.run(compiler.compile(field, build))


def random_answer(
    grammar: Grammar, vocabulary: int, seed: int, most: int = 400, evict: bool = False
) -> list[int] | None:
    """Draw an answer token by token, as the batching engine does, without its end token.

    Args:
        grammar: What it follows.
        vocabulary: Size of the vocabulary.
        seed: Seed of scores and draws.
        most: Most tokens; a longer answer is cut off, and None returned.
        evict: Whether the request goes on elsewhere after every third token.
    """
    scores = torch.Generator().manual_seed(seed)
    tokens = [1, 2, 3]
    work = Work("r", tokens, len(tokens), most, (), Sampling(1.0, seed=seed, grammar=grammar))
    chooser = Chooser(work)
    for step in range(most):
        if evict and step % 3 == 2:
            chooser = Chooser(work)
        row = chooser.row(tokens)
        [chosen] = choose_tokens(torch.randn(1, vocabulary, generator=scores), [row])
        if chosen.token in grammar.end_tokens:
            return tokens[work.prompt_length :]
        tokens = [*tokens, chosen.token]
    return None
