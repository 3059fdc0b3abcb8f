"""Special tokens that the tokenizer adds to a prompt."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import processors

from byte_tokenizer import byte_tokenizer
from frontend.prompts.bodies import ChatRequest, CompletionRequest
from frontend.prompts.reader import ModelLimits, PromptReader


def test_the_client_may_have_its_own_first_token() -> None:
    tokenizer = byte_tokenizer("<s>", bos_token="<s>")
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    first = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", first)]
    )
    tokenizer.chat_template = "<s>{% for m in messages %}{{ m.content }}{% endfor %}"
    reader = PromptReader(tokenizer, ModelLimits(64, 300))

    def firsts(cls: Any, **fields: Any) -> int:
        _, (tokens,) = reader.read(cls, json.dumps(fields).encode())
        return tokens.count(first)

    asked = {"add_special_tokens": True}, {}, {"add_special_tokens": False}
    said = [{"role": "user", "content": "a"}]
    assert [firsts(CompletionRequest, prompt="<s>a", **each) for each in asked] == [2, 2, 1]
    assert [firsts(CompletionRequest, prompt="a", **each) for each in asked] == [1, 1, 0]
    assert [firsts(ChatRequest, messages=said, **each) for each in asked] == [2, 1, 1]
