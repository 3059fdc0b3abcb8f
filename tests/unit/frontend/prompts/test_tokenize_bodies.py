"""Bodies of /tokenize and /detokenize."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from eaas.generation.errors import ApiError
from frontend.prompts.bodies import DetokenizeRequest
from frontend.prompts.reader import ModelLimits, PromptReader


def test_a_text_that_is_too_long_is_refused() -> None:
    tokenizer = SimpleNamespace(decode=lambda tokens: " " * 256 * len(tokens))
    reader = PromptReader(tokenizer, ModelLimits(8, 8))

    def text(count: int) -> str:
        request, _ = reader.read(DetokenizeRequest, json.dumps({"tokens": [5] * count}).encode())
        return str(request.found["text"])

    assert len(text(2**14)) == 2**22
    with pytest.raises(ApiError, match="the limit is 4194304") as caught:
        text(2**14 + 1)
    assert caught.value.param == "tokens"
