"""Prompts that are much too long are refused by their beginning; long ones that fit are not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from byte_tokenizer import byte_tokenizer
from eaas.generation.errors import ApiError
from frontend.prompts.bodies import CompletionRequest
from frontend.prompts.reader import ModelLimits, PromptReader

LONG = "=" * 60
LIMITS = ModelLimits(max_model_len=20, vocabulary=300)


class Spy:
    """A tokenizer that records the lengths of the texts it reads."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._tokenizer = byte_tokenizer("<unk>", unk_token="<unk>")
        self._tokenizer.add_tokens([LONG])

    def __call__(self, text: str, **options: Any) -> Any:
        self.lengths.append(len(text))
        return self._tokenizer(text, **options)


def read(tokenizer: Spy, prompt: str) -> list[int]:
    body = json.dumps({"prompt": prompt}).encode()
    _, (tokens,) = PromptReader(tokenizer, LIMITS).read(CompletionRequest, body)
    return tokens


def test_megabytes_are_refused_by_their_beginning() -> None:
    tokenizer = Spy()
    with pytest.raises(ApiError, match="you requested at least") as refused:
        read(tokenizer, "word " * 1_000_000)
    assert refused.value.code == "context_length_exceeded"
    assert max(tokenizer.lengths) < 1000


@pytest.mark.parametrize("runs", [1, 7, 19])
def test_a_long_text_of_few_tokens_fits(runs: int) -> None:
    assert len(read(Spy(), LONG * runs)) == runs


def test_one_token_too_many_is_counted_exactly() -> None:
    with pytest.raises(ApiError, match=r"requested 21 tokens \(20 in the prompt, 1 in"):
        read(Spy(), LONG * 20)
